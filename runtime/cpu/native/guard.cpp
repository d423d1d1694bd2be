#include "guard.h"

#include <setjmp.h>
#include <signal.h>

#include <mutex>

namespace moe_pack {
namespace {

// Static thread-local storage: a first use in the signal handler must not allocate.
__attribute__((tls_model("initial-exec"))) thread_local sigjmp_buf* way_out = nullptr;

__attribute__((tls_model("initial-exec"))) thread_local bool passing_on = false;

struct sigaction before;

void on_fault(int number, siginfo_t* details, void* machine) {
    if (way_out != nullptr) siglongjmp(*way_out, 1);
    bool is_function = before.sa_flags & SA_SIGINFO || (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN);
    if (!is_function || passing_on) {
        // The earlier handler may call ours again: then the signal came back, and no handler took it.
        signal(number, SIG_DFL);
        if (details->si_code <= 0) raise(number);  // else the instruction runs again
        return;
    }
    passing_on = true;
    if (before.sa_flags & SA_SIGINFO)
        before.sa_sigaction(number, details, machine);
    else
        before.sa_handler(number);
    passing_on = false;
}

}  // namespace

void install_guard() {
    static std::mutex one_at_a_time;
    std::lock_guard<std::mutex> lock(one_at_a_time);
    struct sigaction now = {};
    if (sigaction(SIGBUS, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fault) return;
    before = now;
    struct sigaction ours = {};
    ours.sa_sigaction = on_fault;
    // SA_NODEFER: the handler is left by a jump, which does not unblock the signal.
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGBUS, &ours, nullptr);
}

bool guarded(void (*work)(void*), void* context) {
    sigjmp_buf here;
    sigjmp_buf* volatile outer = way_out;
    if (sigsetjmp(here, 0) != 0) {
        way_out = outer;
        return false;
    }
    way_out = &here;
    work(context);
    way_out = outer;
    return true;
}

}  // namespace moe_pack
