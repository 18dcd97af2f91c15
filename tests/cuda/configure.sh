#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# configure.sh FOLDER: what a plain build makes, and says. No test program; the CUDA backend where there is nvcc, and how to leave it out. An
# nvcc that is too old, or that this C++ compiler is too new for, leaves FMOE_CUDA=AUTO with the CPU library and a message that says which
# nvcc, which version, and which is needed; FMOE_CUDA=ON stops with it.
root=$(cd "$(dirname "$0")/../.." && pwd)
rm -rf "$1" && mkdir -p "$1/bin" && cd "$1" || exit 2
cat >bin/nvcc <<'EOF'
#!/bin/sh
[ "$1" = --version ] && echo "Cuda compilation tools, release 11.8, V11.8.89" && exit 0
echo "error: unsupported GNU version" >&2
exit 1
EOF
chmod +x bin/nvcc
unset CUDACXX CUDA_PATH FMOE_CUDA MAKEFLAGS MFLAGS
passed=0 failed=0 skipped=0
count() { # condition as an exit status, what, file to show
    if [ "$1" -eq 0 ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $2" && tail -20 "$3"
    fi
}
has() { tr -s ' \n' ' ' <"$1" | grep -qF -e "$2"; }

cmake -S "$root" -B plain -G "Unix Makefiles" >plain.log 2>&1
count $? "a plain configuration" plain.log
rules=plain/CMakeFiles/Makefile2
grep -q '^all: cli/all$' $rules && ! grep -q '^all: tests/' $rules
count $? "a plain build makes the command and no test programs" plain.log
for program in tests/CMakeFiles/test_api.dir tests/CMakeFiles/fuzz_plan.dir tests/ascend_sim/CMakeFiles/sim_hccl.dir; do
    grep -q "^CMakeFiles/fmoe_tests.dir/all: $program/all$" $rules
    count $? "fmoe_tests makes $program" plain.log
done
if command -v nvcc >/dev/null; then
    has plain.log 'CUDA backend: built with nvcc' && has plain.log 'leaves it out: `make FMOE_CUDA=OFF`' && grep -q '^all: src/cuda/all$' $rules
    count $? "nothing is said of the CUDA backend" plain.log
else
    echo "nvcc is not installed: what is said where it is" && echo "SKIP" && skipped=1
fi
make -C "$root" -n FMOE_CUDA=OFF BUILD="$PWD/make" >make.log 2>&1 && has make.log '-DFMOE_CUDA=OFF' && grep -qE -e '--parallel [0-9]+' make.log
count $? "make FMOE_CUDA=OFF" make.log

PATH=$PWD/bin:$PATH
expect() { # exit status, FMOE_CUDA, words
    cmake -S "$root" -B "$2" -DFMOE_CUDA="$2" -DFMOE_TESTS=OFF >"$2.log" 2>&1
    [ $? -eq "$1" ] && has "$2.log" "$3"
    count $? "FMOE_CUDA=$2" "$2.log"
}
expect 0 AUTO "CUDA backend: not built: $PWD/bin/nvcc (release 11.8; 12.0 is the least)"
expect 1 ON "FMOE_CUDA is ON, but $PWD/bin/nvcc (release 11.8; 12.0 is the least)"
echo "$passed passed, $failed failed, $skipped skipped"
[ $failed -eq 0 ]
