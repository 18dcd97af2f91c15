#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# configure.sh FOLDER: an nvcc that is too old, or that this C++ compiler is too new for, leaves FMOE_CUDA=AUTO with the CPU library and a
# message that says which nvcc, which version, and which is needed; FMOE_CUDA=ON stops with it.
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$1" && mkdir -p "$1/bin" && cd "$1" || exit 2
cat >bin/nvcc <<'EOF'
#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 11.8, V11.8.89" && exit 0
echo "error: unsupported GNU version" >&2
exit 1
EOF
chmod +x bin/nvcc
unset CUDACXX CUDA_PATH
PATH=$PWD/bin:$PATH
passed=0 failed=0
expect() { # exit status, FMOE_CUDA, words
    cmake -S "$root" -B "$2" -DFMOE_CUDA="$2" -DFMOE_TESTS=OFF >"$2.log" 2>&1
    if [ $? -eq "$1" ] && tr -s ' \n' ' ' <"$2.log" | grep -qF "$3"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: FMOE_CUDA=$2" && tail -20 "$2.log"
    fi
}
expect 0 AUTO "CUDA backend: not built: $PWD/bin/nvcc (release 11.8; 12.0 is the least)"
expect 1 ON "FMOE_CUDA is ON, but $PWD/bin/nvcc (release 11.8; 12.0 is the least)"
echo "$passed passed, $failed failed, 0 skipped"
[ $failed -eq 0 ]
