// The Python face of whole layers.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* open_layers(PyObject* module, PyObject* arguments);
PyObject* set_layer(PyObject* module, PyObject* arguments);
PyObject* set_layer_expert(PyObject* module, PyObject* arguments);
PyObject* set_layer_panels(PyObject* module, PyObject* arguments);
PyObject* begin_layer(PyObject* module, PyObject* arguments);
PyObject* run_layers(PyObject* module, PyObject* arguments);
PyObject* end_layer(PyObject* module, PyObject* arguments);
PyObject* scale_rows(PyObject* module, PyObject* arguments);
PyObject* activate_neurons(PyObject* module, PyObject* arguments);

}  // namespace moe_pack
