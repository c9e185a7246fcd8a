#!/bin/sh
# usage: kernel_symbols.sh NM OBJECT...
# Fails where an object defines a symbol that the linker may merge with another unit's: the survivor,
# compiled for one ISA, would then run on all. Allowed: the compiler's own exception reference.
set -eu
nm=$1
shift
[ $# -gt 0 ] || { echo "kernel_symbols: expected at least one object file" >&2; exit 2; }
symbols=$("$nm" --defined-only "$@")
shared=$(printf '%s\n' "$symbols" | awk '$2 ~ /^[WVu]$/ && $3 != "DW.ref.__gxx_personality_v0"')
if [ -n "$shared" ]; then
  echo "kernel_symbols: $* share symbols with other units; make them always_inline or local:" >&2
  printf '%s\n' "$shared" >&2
  exit 1
fi
# A table of kernels must be there, or nothing was looked at.
for object in "$@"; do
  "$nm" --defined-only "$object" | grep -q Kernels || {
    echo "kernel_symbols: $object has no table of kernels" >&2
    exit 1
  }
done
