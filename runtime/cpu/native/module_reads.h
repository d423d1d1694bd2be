// The Python face of reading files.
#pragma once

#include "arguments.h"

namespace moe_pack {

PyObject* open_reader(PyObject* module, PyObject* arguments);
PyObject* add_file(PyObject* module, PyObject* arguments);
PyObject* submit_reads(PyObject* module, PyObject* arguments);
PyObject* row_pieces(PyObject* module, PyObject* arguments);
PyObject* wait_reads(PyObject* module, PyObject* arguments);
PyObject* are_read(PyObject* module, PyObject* arguments);
PyObject* promote_reads(PyObject* module, PyObject* arguments);
PyObject* cancel_reads(PyObject* module, PyObject* arguments);
PyObject* read_stats(PyObject* module, PyObject* arguments);
PyObject* close_reader(PyObject* module, PyObject* arguments);

}  // namespace moe_pack
