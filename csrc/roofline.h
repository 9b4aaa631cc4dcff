// What this machine can do at most, measured: the roof that a profile compares the ops with.
//
//   FLOP/s ^            ____________________  peak: products of this table from the nearest caches
//          |          /
//          |        /   slope: bytes/s of a plain read over as much memory as the weights take
//          |      /
//          +------------------------------->  FLOP per byte
#pragma once

#include <vector>

#include "kernels.h"
#include "pool.h"
#include "weight.h"

namespace octavo {

// Each is the best of several runs on all threads of the pool, which start together; bytes or operations a second.
struct Roofline {
  double memory_bytes = 0;   // a plain streaming read over more than any cache holds (512 MiB)
  double weights_bytes = 0;  // the same over the packed weights, one after another: what a decode step could read them at
  double product_bytes = 0;  // the table's own products of one row with each weight in turn, no barrier in between: what its
                             // decode steps could reach if nothing but products ran
  double product_flops = 0;  // the table's own products of many rows, weight and rows held in L1 or L2, whichever is faster
  double weights_size = 0;   // bytes
};

// `weights`: at least one. The pool must be idle.
Roofline measure_roofline(Pool& pool, const Kernels& kernels, const std::vector<Weight>& weights);

}  // namespace octavo
