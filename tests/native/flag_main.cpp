// Calls through a flag, alone: a small program that is built in seconds, for ThreadSanitizer.
//
//   flags-tsan CASES [SEED]
#include <unistd.h>

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "cases.h"

namespace moe_pack {

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fprintf(stderr, "\n");
    _exit(1);
}

}  // namespace moe_pack

int main(int count, char** arguments) {
    using namespace moe_pack;
    const long cases = count > 1 ? std::atol(arguments[1]) : 100;
    const uint64_t seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    for (long i = 0; i < cases; i++) {
        alarm(120);  // no case takes one second, but on a busy machine
        Random random(seed + (uint64_t)i);
        play_flags(random);
    }
    std::printf("%ld cases of calls through a flag from seed %llu on\n", cases, (unsigned long long)seed);
}
