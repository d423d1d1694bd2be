// The Python face of the host's share of a GPU's experts.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* open_share(PyObject* module, PyObject* arguments);
PyObject* run_share(PyObject* module, PyObject* arguments);
PyObject* share_function(PyObject* module, PyObject* arguments);
PyObject* share_counts(PyObject* module, PyObject* capsule);
PyObject* take_share_fault(PyObject* module, PyObject* capsule);

}  // namespace moe_pack
