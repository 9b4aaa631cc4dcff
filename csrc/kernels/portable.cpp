// Any machine: what the compiler's baseline has.
#include "kernels/vec_portable.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kPortable = table("portable");
}
