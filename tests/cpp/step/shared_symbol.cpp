// What kernel_symbols.sh must refuse: an inline function that was not inlined.
__attribute__((noinline)) inline int shared_between_units(int value) { return value + 1; }

int use_shared_between_units(int value) { return shared_between_units(value); }
