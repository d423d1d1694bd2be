// A file that is cut while its map is read: the fault ends the work that met it, not the process.
#pragma once

namespace moe_pack {

// Takes over SIGBUS; faults outside `guarded` go to the handler that was there before. May be called again.
void install_guard();

// Runs work(context); false if it read a page that its file no longer has. The work must own nothing: it is left as
// by a jump, without destructors. Any thread; may be nested.
bool guarded(void (*work)(void*), void* context);

}  // namespace moe_pack
