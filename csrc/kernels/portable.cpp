// Any machine: what the compiler's baseline has.
#include "kernels/bytes_portable.h"

#include "kernels/table.h"

namespace octavo {
constinit const Kernels kPortable = table("portable");
}
