// Copies, flags, events and launches on several streams, played from a list in one call of Python's: what a rank of a
// group sends to others and waits for, and what it computes meanwhile (distributed/symmetric.py).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "framework.h"

namespace microsdpa {

// What Operations of distributed/operations.py packs. `numbers` are, by the code: COPY, address and pitch to copy to,
// address and pitch to copy from, bytes of a row, and rows; WRITE and AWAIT_VALUE, an address and its value of 32 bits;
// RECORD and AWAIT_EVENT, an event; LAUNCH, the number of a launch.
struct Operation {
  enum Code { COPY, WRITE, AWAIT_VALUE, RECORD, AWAIT_EVENT, LAUNCH, CODES };
  static constexpr std::int64_t CALLERS = -1, NO_TENSOR = -1;

  std::int64_t code;
  std::int64_t stream;  // a handle, or CALLERS for the stream that the call is made on
  std::int64_t tensor;  // the operand that is copied from, whose address may change from call to call; or NO_TENSOR
  std::int64_t numbers[6];
};
static_assert(sizeof(Operation) == 9 * 8, "Operation is read from packed integers");

class Exchange {
 public:
  // `launches`: launches that the list may name.
  Exchange(const ffi::Bytes& packed, std::size_t launches) : operations_(packed.size() / sizeof(Operation)) {
    TVM_FFI_CHECK(packed.size() % sizeof(Operation) == 0, ValueError)
        << "operations: expected " << sizeof(Operation) << " bytes for each, got " << packed.size();
    if (packed.size()) std::memcpy(operations_.data(), packed.data(), packed.size());
    for (const Operation& operation : operations_) {
      TVM_FFI_CHECK(operation.code >= 0 && operation.code < Operation::CODES, ValueError)
          << "operations: expected a code below " << int(Operation::CODES) << ", got " << operation.code;
      TVM_FFI_CHECK(operation.tensor >= Operation::NO_TENSOR && operation.tensor < DENSE_OPERANDS, ValueError)
          << "operations: expected an operand below " << int(DENSE_OPERANDS) << ", got " << operation.tensor;
      const bool launches_known =
          operation.code != Operation::LAUNCH || static_cast<std::uint64_t>(operation.numbers[0]) < launches;
      TVM_FFI_CHECK(launches_known, ValueError)
          << "operations: expected a launch below " << launches << ", got " << operation.numbers[0];
    }
  }

  const std::vector<Operation>& operations() const { return operations_; }

  // Puts all operations on their streams; a context is current. `moved` are the bytes by which each dense operand lies
  // elsewhere than in the list. `launch(number, stream)` launches. After a failure launches are left out, and the rest
  // is played: other ranks wait for it. Then the first failure is thrown.
  template <typename Launch>
  void play(const Driver& driver, CUstream callers, const std::int64_t* moved, Launch launch) const {
    std::exception_ptr failure;
    for (const Operation& operation : operations_) {
      const bool is_callers = operation.stream == Operation::CALLERS;
      const CUstream stream = is_callers ? callers : reinterpret_cast<CUstream>(operation.stream);
      try {
        if (operation.code != Operation::LAUNCH) {
          issue(driver, operation, stream, operation.tensor == Operation::NO_TENSOR ? 0 : moved[operation.tensor]);
        } else if (!failure) {
          launch(static_cast<std::size_t>(operation.numbers[0]), stream);
        }
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    }
    if (failure) std::rethrow_exception(failure);
  }

 private:
  static void issue(const Driver& driver, const Operation& operation, CUstream stream, std::int64_t moved) {
    const std::int64_t* numbers = operation.numbers;
    const auto address = static_cast<CUdeviceptr>(numbers[0]);
    switch (operation.code) {
      case Operation::COPY: {
        CUDA_MEMCPY2D copy{};
        copy.dstMemoryType = copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
        copy.dstDevice = address, copy.dstPitch = static_cast<std::size_t>(numbers[1]);
        copy.srcDevice = static_cast<CUdeviceptr>(numbers[2] + moved);
        copy.srcPitch = static_cast<std::size_t>(numbers[3]);
        copy.WidthInBytes = static_cast<std::size_t>(numbers[4]), copy.Height = static_cast<std::size_t>(numbers[5]);
        return check(driver, driver.memory_copy(&copy, stream), "cuMemcpy2DAsync");
      }
      case Operation::WRITE:
        return check(driver, driver.stream_write(stream, address, static_cast<cuuint32_t>(numbers[1]), 0),
                     "cuStreamWriteValue32");
      case Operation::AWAIT_VALUE:
        return check(driver,
                     driver.stream_wait(stream, address, static_cast<cuuint32_t>(numbers[1]), CU_STREAM_WAIT_VALUE_EQ),
                     "cuStreamWaitValue32");
      case Operation::RECORD:
        return check(driver, driver.event_record(reinterpret_cast<CUevent>(numbers[0]), stream), "cuEventRecord");
      case Operation::AWAIT_EVENT:
        return check(driver, driver.stream_wait_event(stream, reinterpret_cast<CUevent>(numbers[0]), 0),
                     "cuStreamWaitEvent");
    }
  }

  // launcher.py gives errors of this kind their class.
  static void check(const Driver& driver, CUresult result, const char* call) {
    if (result == CUDA_SUCCESS) return;
    std::string words;
    try {
      driver.check(result, call);
    } catch (const std::runtime_error& error) {
      words = error.what();
    }
    TVM_FFI_THROW(microsdpa.ExchangeError) << "symmetric memory: " << words << "; use transport='collective'";
  }

  std::vector<Operation> operations_;
};

}  // namespace microsdpa
