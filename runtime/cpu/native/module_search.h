// The Python face of the search for trellis codes.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* search_codes(PyObject* module, PyObject* arguments);

}  // namespace moe_pack
