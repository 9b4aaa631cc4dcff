// Each part of the extension registers itself; bindings.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

void bind_kernels(nanobind::module_& m);   // every kernel of every table, for tests
void bind_quant(nanobind::module_& m);    // weights in few bits: packing and products, for tests
void bind_sampling(nanobind::module_& m);  // logits to tokens
void bind_program(nanobind::module_& m);   // programs: a model, lowered, and its runner
