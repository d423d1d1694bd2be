// What the Python faces of operations share: buffers and numbers in, sizes checked, the interpreter's lock given back.
//
// Buffers come by the buffer protocol and are as long as they say; every size that follows from a layout is compared
// with that before any byte is read. What says where to read or write is copied, and stays as it was checked whatever
// Python does meanwhile. No exception leaves a function that goes through `caught`. Stable ABI of Python 3.11.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>
#include <vector>

#include "experts.h"
#include "panels.h"

namespace moe_pack {

constexpr size_t kMaxTokens = 1 << 30;  // and places: what counts them is of 32 bits
constexpr size_t kMaxExperts = 1 << 20;
constexpr const char* kPoolName = "moe_pack.runtime.cpu._native.Pool";

extern PyObject* cut_error;  // MapCutError

// A buffer of values of one size, given back at the end. A missing one (None) has no values.
template <class T>
class Buffer {
  public:
    ~Buffer() {
        if (held_) PyBuffer_Release(&view_);
    }
    bool take(PyObject* from, const char* name, bool writable = false) {
        if (from == Py_None) return true;
        if (PyObject_GetBuffer(from, &view_, writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO) != 0) return false;
        held_ = true;
        if (view_.len % (Py_ssize_t)sizeof(T) == 0 && (uintptr_t)view_.buf % alignof(T) == 0) return true;
        PyErr_Format(PyExc_ValueError, "%s: no whole number of values, or not aligned", name);
        return false;
    }
    T* values() const { return held_ ? static_cast<T*>(view_.buf) : nullptr; }
    size_t size() const { return held_ ? (size_t)view_.len / sizeof(T) : 0; }

  private:
    Py_buffer view_ = {};
    bool held_ = false;
};

// A buffer's values as they are now.
template <class T>
class Copied {
  public:
    bool take(PyObject* from, const char* name) {
        Buffer<const T> given;
        if (!given.take(from, name)) return false;
        copies_.assign(given.values(), given.values() + given.size());
        return true;
    }
    const T* values() const { return copies_.data(); }
    size_t size() const { return copies_.size(); }

  private:
    std::vector<T> copies_;
};

inline PyObject* refuse(const char* name, const char* fault) {
    PyErr_Format(PyExc_ValueError, "%s: %s", name, fault);
    return nullptr;
}

inline bool has_size(const char* name, size_t found, size_t expected) {
    if (found == expected) return true;
    PyErr_Format(PyExc_ValueError, "%s: %zu values, expected %zu", name, found, expected);
    return false;
}

inline bool all_below(const char* name, const int32_t* values, size_t count, size_t limit) {
    for (size_t i = 0; i < count; i++)
        if (values[i] < 0 || (size_t)values[i] >= limit) {
            if (limit == 0) return refuse(name, "there are no rows") != nullptr;
            PyErr_Format(PyExc_ValueError, "%s: %d, expected 0 to %zu", name, (int)values[i], limit - 1);
            return false;
        }
    return true;
}

// How many tokens of `d` values there are.
inline bool count_tokens(const char* name, size_t num_values, size_t d, int32_t* num_tokens) {
    if (num_values / d > kMaxTokens) return refuse(name, "too many tokens") != nullptr;
    *num_tokens = (int32_t)(num_values / d);
    return has_size(name, num_values, *num_tokens * d);
}

inline bool take_layout(PyObject* from, ExpertLayout* layout) {
    Copied<int32_t> numbers;
    if (!numbers.take(from, "layout")) return false;
    const char* fault = read_expert_layout(numbers.values(), numbers.size(), layout);
    return fault == nullptr || refuse("layout", fault) != nullptr;
}

// An expert's panels: those of its selector's rows, and those of its records. None: it has none yet.
struct GivenPanels {
    Buffer<const uint8_t> bytes;

    bool take(PyObject* from, const ExpertLayout& layout) {
        if (!bytes.take(from, "panels") || bytes.values() == nullptr) return from == Py_None;
        if (!can_panel(layout)) return refuse("panels", "the layout has none") != nullptr;
        return has_size("panels", bytes.size(), expert_panel_bytes(layout));
    }
    void give(const ExpertLayout& layout, const uint8_t** selector, const uint8_t** records) const {
        if (bytes.values() == nullptr) return;
        *selector = bytes.values();
        *records = bytes.values() + selector_panel_bytes(layout);
    }
};

// The tuples of a list, taken one by one.
template <class Given, class Take>
bool take_each(PyObject* list, const char* name, std::vector<Given>& held, const Take& take) {
    size_t count = PyList_Size(list);
    if (count > kMaxExperts) return refuse(name, "too many") != nullptr;
    held = std::vector<Given>(count);
    for (size_t i = 0; i < count; i++) {
        PyObject* tuple = PyList_GetItem(list, i);
        if (tuple == nullptr || !PyTuple_Check(tuple)) return refuse(name, "expected tuples") != nullptr;
        // Ours while it is read: numbers may be objects whose conversion changes the list.
        Py_INCREF(tuple);
        bool taken = take(held[i], tuple);
        Py_DECREF(tuple);
        if (!taken) return false;
    }
    return true;
}

inline Pool* pool_of(PyObject* capsule) { return static_cast<Pool*>(PyCapsule_GetPointer(capsule, kPoolName)); }

inline PyObject* finished(Outcome outcome) {
    if (outcome == Outcome::no_memory) return PyErr_NoMemory();
    if (outcome == Outcome::done) Py_RETURN_NONE;
    PyErr_SetString(cut_error, "a page that was read is no longer in its file");
    return nullptr;
}

// Work without the interpreter's lock.
template <class Work>
PyObject* unlocked(const Work& work) {
    Outcome outcome = Outcome::no_memory;
    Py_BEGIN_ALLOW_THREADS;
    try {
        outcome = work();
    } catch (const std::bad_alloc&) {
    }
    Py_END_ALLOW_THREADS;
    return finished(outcome);
}

// A function for Python: what it throws becomes an error there.
template <PyObject* (*call)(PyObject*, PyObject*)>
PyObject* caught(PyObject* self, PyObject* arguments) {
    try {
        return call(self, arguments);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

}  // namespace moe_pack
