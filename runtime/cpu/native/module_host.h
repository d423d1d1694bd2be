// The Python face of the host's share of a GPU's experts, and of a GPU's calls.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* open_share(PyObject* module, PyObject* arguments);
PyObject* run_share(PyObject* module, PyObject* arguments);
PyObject* share_counts(PyObject* module, PyObject* capsule);
PyObject* take_share_fault(PyObject* module, PyObject* capsule);

PyObject* open_calls(PyObject* module, PyObject* arguments);
PyObject* serve_calls(PyObject* module, PyObject* arguments);
PyObject* next_call(PyObject* module, PyObject* capsule);
PyObject* take_call_fault(PyObject* module, PyObject* capsule);
PyObject* close_calls(PyObject* module, PyObject* capsule);

}  // namespace moe_pack
