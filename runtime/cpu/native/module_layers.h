// The Python face of what a layer does between its products.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* attend_heads(PyObject* module, PyObject* arguments);
PyObject* recur_heads(PyObject* module, PyObject* arguments);
PyObject* convolve_channels(PyObject* module, PyObject* arguments);
PyObject* gated_delta_heads(PyObject* module, PyObject* arguments);
PyObject* norm_rows(PyObject* module, PyObject* arguments);
PyObject* rotate_all(PyObject* module, PyObject* arguments);
PyObject* route_tokens(PyObject* module, PyObject* arguments);

}  // namespace moe_pack
