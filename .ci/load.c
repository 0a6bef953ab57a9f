// Loads the launcher of a wheel for another machine, under an emulator of that machine's processor, and calls it:
// load LIBTVM_FFI LAUNCHER. What it exports takes and gives TVMFFIAny, a number for the type and eight bytes.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

typedef struct {
  int32_t type, padding;
  int64_t value;
} Any;
typedef int (*Function)(void*, const Any*, int32_t, Any*);

int main(int count, char** paths) {
  void* library = NULL;
  for (int i = 1; i < count; i++) {
    library = dlopen(paths[i], RTLD_NOW | RTLD_GLOBAL);
    if (!library) return puts(dlerror()), 1;
  }
  const Function version = (Function)dlsym(library, "__tvm_ffi_driver_version");
  const Function sdpa = (Function)dlsym(library, "__tvm_ffi_sdpa");
  if (!version || !sdpa) return puts("a function is missing"), 1;
  Any result = {0, 0, -1};
  if (version(NULL, NULL, 0, &result) || result.type != 1 || result.value < 0) return puts("driver_version fails"), 1;
  if (!sdpa(NULL, NULL, 0, &result)) return puts("sdpa takes a call without tensors"), 1;
  return puts("the launcher loads, answers, and refuses a call without tensors"), 0;
}
