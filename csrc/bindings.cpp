// The extension module octavo._native: the only files that see Python are this one and its siblings.
#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_native, m) {
  m.doc() = "octavo's native CPU runtime";
  bind_kernels(m);
  bind_quant(m);
  bind_sampling(m);
  bind_program(m);
}
