# make demo     set up, train a small model on real data, draw its report; the same again, killed half
#               way and started again: it ends at the same bits
# make demo-distributed  the same by two ranks that share gradients
# make test     everything that proves the engine right
# make test-torch-suite  PyTorch's own tests over our classes (downloads their files once)
# make bench    the figures of the README, measured on this machine
# make gpu      build in the current Python, run the GPU tests and benchmarks (no network needed)
PYTHON ?= python3
VENV_PYTHON := .venv/bin/python

.PHONY: demo demo-distributed test test-torch-suite bench gpu format stubs clean

demo:
	@PYTHON=$(PYTHON) scripts/setup.sh demo
	@$(VENV_PYTHON) scripts/demo.py

demo-distributed:
	@PYTHON=$(PYTHON) scripts/setup.sh demo
	@OMP_NUM_THREADS=1 $(VENV_PYTHON) -m torch.distributed.run --nproc-per-node=2 examples/digits.py

test:
	@PYTHON=$(PYTHON) scripts/setup.sh test
	$(VENV_PYTHON) -m pytest $(PYTEST_ARGS)

test-torch-suite:
	@PYTHON=$(PYTHON) scripts/setup.sh test
	$(VENV_PYTHON) tests/torch_suite/run.py $(SUITE_ARGS)
	$(VENV_PYTHON) tests/torch_suite/distributed.py $(SUITE_ARGS)

bench:
	@PYTHON=$(PYTHON) scripts/setup.sh test
	$(VENV_PYTHON) benchmarks/step.py $(BENCH_ARGS)
	$(VENV_PYTHON) benchmarks/footprint.py $(BENCH_ARGS)

gpu:
	$(PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest tests/python/gpu $(PYTEST_ARGS)
	$(PYTHON) benchmarks/gpu_step.py $(BENCH_ARGS)
	$(PYTHON) benchmarks/gpu_share.py $(BENCH_ARGS)

format:
	$(VENV_PYTHON) -m ruff check --fix .
	$(VENV_PYTHON) -m ruff format .
	find csrc tests/cpp benchmarks -name '*.h' -o -name '*.cpp' -o -name '*.cu' | \
		xargs .venv/bin/clang-format -i

stubs:
	$(VENV_PYTHON) cmake/native_stubs.py > build/_native.pyi
	mv build/_native.pyi python/tradewind/_native.pyi

clean:
	rm -rf build .venv
