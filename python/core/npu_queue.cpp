// SPDX-License-Identifier: Apache-2.0
//
// Our launches in torch_npu's task queue: in order with its own, without waiting until the queue is empty. The function
// for that is C++ and not part of torch_npu's interface: it is found under its mangled name (GNU's C++11 ABI), or not
// at all, and then torch.c asks for the stream in the way that drains the queue. This file is C++ because that function
// takes a std::function and throws.
#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>

static thread_local char problem[512];

extern "C" void *fmoe_npu_queue(void)
{
    static const char name[] = "_ZN6at_npu6native9OpCommand10RunOpApiV2E"
                               "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKSt8functionIFivEEb";
    void *npu = dlopen("libtorch_npu.so", RTLD_NOW | RTLD_NOLOAD);
    return npu ? dlsym(npu, name) : nullptr;
}

// What went wrong in fmoe_npu_submit on this thread since the last time this was asked, "" for nothing.
extern "C" const char *fmoe_npu_problem(void)
{
    static thread_local char told[sizeof problem];
    std::snprintf(told, sizeof told, "%s", problem);
    problem[0] = 0;
    return told;
}

// An fmoe_submit_fn; queue is what fmoe_npu_queue found. launch(arg) is called at most once, and not when the answer is
// not 0.
extern "C" int fmoe_npu_submit(void *queue, const char *name, int (*launch)(void *), void *arg)
{
    const auto run = reinterpret_cast<void (*)(const std::string &, const std::function<int()> &, bool)>(queue);
    std::shared_ptr<std::atomic<bool>> taken;
    try {
        taken = std::make_shared<std::atomic<bool>>(false);
        run(name, [=] { return taken->exchange(true) ? 0 : launch(arg); }, false);
    } catch (const std::exception &e) {
        std::snprintf(problem, sizeof problem, "%s: torch_npu: %s", name, e.what());
        return taken && taken->exchange(true) ? 0 : -1;
    }
    return 0;
}
