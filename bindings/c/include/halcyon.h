/* The C library of Halcyon: docs/c-api.md explains it.
 *
 * Written by bindings/c/check from the library's sources; do not edit.
 *
 * Strings are UTF-8 and end with NUL; a "Safety" section calls such a string "a string". Pointers must be
 * valid as these sections say. NULL where it is not allowed is an error, not undefined behaviour.
 */

#ifndef HALCYON_H
#define HALCYON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * The version of the interface that this header describes. `halcyon_abi_version` returns the version of the
 * library that is loaded; a program must not use a library with another number.
 */
#define HALCYON_ABI_VERSION 1

/**
 * A number of bytes that the driver does not report.
 */
#define HALCYON_UNKNOWN UINT64_MAX

/**
 * The result of a function. Every value except `HALCYON_STATUS_OK` is a failure, whose text
 * `halcyon_last_error` returns.
 */
enum HalcyonStatus
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The function did what it was asked to do.
     */
    HALCYON_STATUS_OK = 0,
    /**
     * An argument is invalid: a null pointer, text that is not UTF-8, an unknown name, a number out of
     * range.
     */
    HALCYON_STATUS_ARGUMENT = 1,
    /**
     * The sizes of a tensor are not those that its elements or the model need.
     */
    HALCYON_STATUS_SHAPE = 2,
    /**
     * An element type that is not accepted here.
     */
    HALCYON_STATUS_DTYPE = 3,
    /**
     * Something that Halcyon does not support.
     */
    HALCYON_STATUS_UNSUPPORTED = 4,
    /**
     * A backend, a library or a device is missing.
     */
    HALCYON_STATUS_UNAVAILABLE = 5,
    /**
     * There is not enough free memory.
     */
    HALCYON_STATUS_OUT_OF_MEMORY = 6,
    /**
     * A call into a driver failed, or a device's compiler rejected a kernel.
     */
    HALCYON_STATUS_DRIVER = 7,
    /**
     * A model read an index that is out of range.
     */
    HALCYON_STATUS_INDEX = 8,
    /**
     * A file or a model in memory is malformed.
     */
    HALCYON_STATUS_FORMAT = 9,
    /**
     * A file cannot be read.
     */
    HALCYON_STATUS_IO = 10,
    /**
     * A loop of a model did not end.
     */
    HALCYON_STATUS_ENDLESS = 11,
    /**
     * The handle is in use by another call.
     */
    HALCYON_STATUS_BUSY = 12,
    /**
     * A bug in Halcyon. The process can go on, but the handles of the call should be freed.
     */
    HALCYON_STATUS_INTERNAL = 13,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum HalcyonStatus HalcyonStatus;
#else
typedef int32_t HalcyonStatus;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * Why a generation ended.
 */
enum HalcyonFinish
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * The model ended the text, or a stop text appeared.
     */
    HALCYON_FINISH_STOP = 0,
    /**
     * The limit of tokens is reached, or the context is full.
     */
    HALCYON_FINISH_LENGTH = 1,
    /**
     * The function that receives the text ended it.
     */
    HALCYON_FINISH_CANCELLED = 2,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum HalcyonFinish HalcyonFinish;
#else
typedef int32_t HalcyonFinish;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The kind of the value of an input or output.
 */
enum HalcyonPortKind
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * Nothing: the port is NULL.
     */
    HALCYON_PORT_KIND_NONE = 0,
    /**
     * A tensor of numbers or text, which is the only kind that the C library can pass.
     */
    HALCYON_PORT_KIND_TENSOR = 1,
    /**
     * A sequence of values.
     */
    HALCYON_PORT_KIND_SEQUENCE = 2,
    /**
     * A value or nothing.
     */
    HALCYON_PORT_KIND_OPTIONAL = 3,
    /**
     * A map from integers or text to values.
     */
    HALCYON_PORT_KIND_MAP = 4,
    /**
     * The model does not declare the type of the output, and it follows only in a run: from the sizes or the
     * values of its inputs. The element type is `HALCYON_DTYPE_NONE` and the rank -1.
     */
    HALCYON_PORT_KIND_UNKNOWN = 5,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum HalcyonPortKind HalcyonPortKind;
#else
typedef int32_t HalcyonPortKind;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * The element type of a tensor. The numbers are those of ONNX's `TensorProto.DataType`.
 *
 * Elements of fewer than 8 bits are packed into bytes, the first element in the low bits.
 */
enum HalcyonDtype
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
    /**
     * No element type: the value is not a tensor, or its type is not known before a run.
     */
    HALCYON_DTYPE_NONE = 0,
    /**
     * `float`.
     */
    HALCYON_DTYPE_F32 = 1,
    /**
     * `uint8_t`.
     */
    HALCYON_DTYPE_U8 = 2,
    /**
     * `int8_t`.
     */
    HALCYON_DTYPE_I8 = 3,
    /**
     * `uint16_t`.
     */
    HALCYON_DTYPE_U16 = 4,
    /**
     * `int16_t`.
     */
    HALCYON_DTYPE_I16 = 5,
    /**
     * `int32_t`.
     */
    HALCYON_DTYPE_I32 = 6,
    /**
     * `int64_t`.
     */
    HALCYON_DTYPE_I64 = 7,
    /**
     * Text. Such tensors are made by `halcyon_tensor_from_strings` and read by `halcyon_tensor_string`.
     */
    HALCYON_DTYPE_STRING = 8,
    /**
     * `bool`: one byte, 0 or 1.
     */
    HALCYON_DTYPE_BOOL = 9,
    /**
     * IEEE 754 binary16.
     */
    HALCYON_DTYPE_F16 = 10,
    /**
     * `double`.
     */
    HALCYON_DTYPE_F64 = 11,
    /**
     * `uint32_t`.
     */
    HALCYON_DTYPE_U32 = 12,
    /**
     * `uint64_t`.
     */
    HALCYON_DTYPE_U64 = 13,
    /**
     * The upper 16 bits of a `float`.
     */
    HALCYON_DTYPE_BF16 = 16,
    /**
     * 8 bits, without infinity (OCP E4M3).
     */
    HALCYON_DTYPE_F8E4M3FN = 17,
    /**
     * 8 bits, without infinity and negative zero.
     */
    HALCYON_DTYPE_F8E4M3FNUZ = 18,
    /**
     * 8 bits, with infinity (OCP E5M2).
     */
    HALCYON_DTYPE_F8E5M2 = 19,
    /**
     * 8 bits, without infinity and negative zero.
     */
    HALCYON_DTYPE_F8E5M2FNUZ = 20,
    /**
     * 4 bits, unsigned.
     */
    HALCYON_DTYPE_U4 = 21,
    /**
     * 4 bits, signed.
     */
    HALCYON_DTYPE_I4 = 22,
    /**
     * 4 bits (OCP E2M1).
     */
    HALCYON_DTYPE_F4E2M1 = 23,
    /**
     * 8 bits, a power of two (OCP E8M0).
     */
    HALCYON_DTYPE_F8E8M0 = 24,
    /**
     * 2 bits, unsigned.
     */
    HALCYON_DTYPE_U2 = 25,
    /**
     * 2 bits, signed.
     */
    HALCYON_DTYPE_I2 = 26,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum HalcyonDtype HalcyonDtype;
#else
typedef int32_t HalcyonDtype;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

/**
 * An open device. Any number of threads may use a handle of this type at the same time.
 */
typedef struct HalcyonBackend HalcyonBackend;

/**
 * A device of a `HalcyonDevices`.
 */
typedef struct HalcyonDevice HalcyonDevice;

/**
 * The devices that were found, and the backends without a device.
 */
typedef struct HalcyonDevices HalcyonDevices;

/**
 * A language model with its cache and its tokenizer. Any thread may use a handle of this type. While a call
 * generates, another call with the same handle fails with `HALCYON_STATUS_BUSY`.
 */
typedef struct HalcyonGenerator HalcyonGenerator;

/**
 * A model on a backend. Any number of threads may use a handle of this type at the same time; their runs
 * share the weights.
 */
typedef struct HalcyonModel HalcyonModel;

/**
 * Options of `halcyon_backend_open`. One thread at a time may use a handle of this type.
 */
typedef struct HalcyonOptions HalcyonOptions;

/**
 * An input or output of a model. It belongs to the model.
 */
typedef struct HalcyonPort HalcyonPort;

/**
 * A tensor in host memory. It never changes, so any number of threads may use a handle of this type at the
 * same time.
 */
typedef struct HalcyonTensor HalcyonTensor;

/**
 * How text is generated. `halcyon_generate_options_init` sets the default values.
 */
typedef struct {
    /**
     * The most tokens to generate; 0: until the text ends or the context is full.
     */
    size_t max_tokens;
    /**
     * Logits are divided by this. 0: always the most probable token, and nothing is drawn.
     */
    float temperature;
    /**
     * Only so many of the most probable tokens; 0: all.
     */
    size_t top_k;
    /**
     * Only the most probable tokens whose probabilities reach this sum; 1: all.
     */
    float top_p;
    /**
     * Only tokens that are at least this factor as probable as the most probable one; 0: all.
     */
    float min_p;
    /**
     * Positive logits of tokens that occurred are divided by this, negative ones multiplied; 1: none.
     */
    float repeat_penalty;
    /**
     * Equal seeds give equal draws.
     */
    uint64_t seed;
    /**
     * Texts at which the generation ends. They are not part of the result. NULL if `stop_count` is 0.
     */
    const char *const *stop;
    /**
     * The number of texts in `stop`.
     */
    size_t stop_count;
} HalcyonGenerateOptions;

/**
 * Receives text as soon as it is final. `text` ends with NUL and has `length` bytes, because it may contain
 * NUL; it is valid during the call. `user` is the pointer that the caller of the generation gave. The
 * function returns false to end the generation. It must return normally (no exception, no `longjmp`), and it
 * must not free the generator.
 */
typedef bool (*HalcyonTextFunction)(const char *text, size_t length, void *user);

/**
 * What a generation did.
 */
typedef struct {
    /**
     * Tokens of the prompt.
     */
    size_t prompt_tokens;
    /**
     * Tokens that were generated.
     */
    size_t tokens;
    /**
     * Why the generation ended.
     */
    HalcyonFinish finish;
} HalcyonGenerated;

/**
 * A message of a chat.
 */
typedef struct {
    /**
     * `system`, `user` or `assistant`. Which ones exist depends on the model.
     */
    const char *role;
    /**
     * The text of the message.
     */
    const char *content;
} HalcyonMessage;

/**
 * The memory that a run needs, in bytes, computed without running or allocating anything.
 */
typedef struct {
    /**
     * Weights on the device.
     */
    uint64_t weights;
    /**
     * Weights that the device reads from host memory without a copy. They are not part of `device`.
     */
    uint64_t weights_in_place;
    /**
     * Weights in the layout of the device's kernels.
     */
    uint64_t packed_weights;
    /**
     * Intermediate results.
     */
    uint64_t activations;
    /**
     * Memory that kernels need besides.
     */
    uint64_t workspace;
    /**
     * The inputs on the device.
     */
    uint64_t inputs;
    /**
     * The outputs on the device.
     */
    uint64_t outputs;
    /**
     * The sum on the device: the peak if the device does nothing else.
     */
    uint64_t device;
    /**
     * The free memory of the device; `HALCYON_UNKNOWN` if its driver does not report it and no limit is set.
     */
    uint64_t free;
    /**
     * Whether `device` is at most `free`. True if `free` is unknown.
     */
    bool fits;
} HalcyonFit;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The version of the interface of the loaded library: `HALCYON_ABI_VERSION` of its header.
 */
uint32_t halcyon_abi_version(void);

/**
 * The version of Halcyon, such as `0.1.0`. The string is valid for ever.
 */
const char *halcyon_version(void);

/**
 * The text of the last failure on this thread; empty if nothing has failed on it. Never NULL. A call that
 * succeeds leaves the text as it is. The string is valid until the next failure on this thread, or until the
 * thread ends.
 */
const char *halcyon_last_error(void);

/**
 * The status of the last failure on this thread; `HALCYON_STATUS_OK` if nothing has failed on it. It says
 * why a function that returns a value returned NULL, 0 or -1.
 */
HalcyonStatus halcyon_last_status(void);

/**
 * The name of a status, such as `out of memory`. Never NULL. The string is valid for ever.
 */
const char *halcyon_status_name(int32_t status);

/**
 * Sets the program that probes drivers: the path of the command `halcyon` of the same version. A driver that
 * crashes or hangs then ends a process of this program and not the caller's. Without a program, drivers are
 * probed in the caller's process, and TPUs are not detected. Call it before any function that looks for
 * devices. A second call with another path is an error.
 *
 * # Safety
 * `path` is a string.
 */
HalcyonStatus halcyon_set_probe_program(const char *path);

/**
 * Makes options with the default values. The caller frees `*out` with `halcyon_options_free`.
 *
 * # Safety
 * `out` points to a pointer.
 */
HalcyonStatus halcyon_options_new(HalcyonOptions **out);

/**
 * Frees options. NULL is allowed.
 *
 * # Safety
 * `options` is NULL or options that were not freed yet, and nothing uses them any more.
 */
void halcyon_options_free(HalcyonOptions *options);

/**
 * Sets the number of threads of the CPU device, including the calling thread. On other devices the option
 * has no effect, which `halcyon_backend_warnings` reports. Without it, all processors are used. 0 is an
 * error of `halcyon_backend_open`.
 *
 * # Safety
 * `options` are options.
 */
HalcyonStatus halcyon_options_set_threads(HalcyonOptions *options, size_t threads);

/**
 * Sets the optimisation level: `O0`, `O1`, `O2` or `O3`. Without it, `O2`.
 *
 * # Safety
 * `options` are options, `level` is a string.
 */
HalcyonStatus halcyon_options_set_level(HalcyonOptions *options, const char *level);

/**
 * Sets the element type of matrix products and convolutions: `f32`, `bf16` or `f16`. Inputs and outputs keep
 * their types. It needs level `O2`. Without it, the environment variable `HALCYON_PRECISION`, else `f32`.
 *
 * # Safety
 * `options` are options, `precision` is a string.
 */
HalcyonStatus halcyon_options_set_precision(HalcyonOptions *options, const char *precision);

/**
 * Sets the most bytes that may be taken from the device's driver. A run that needs more fails with
 * `HALCYON_STATUS_OUT_OF_MEMORY`.
 *
 * # Safety
 * `options` are options.
 */
HalcyonStatus halcyon_options_set_memory_limit(HalcyonOptions *options, uint64_t bytes);

/**
 * Sets the bytes of memory that must be free. A device with less is not chosen; the report of the selection
 * says how many bytes are missing.
 *
 * # Safety
 * `options` are options.
 */
HalcyonStatus halcyon_options_set_memory_needed(HalcyonOptions *options, uint64_t bytes);

/**
 * Opens a device. `name` is the name of a backend (`cuda`: its first device), of a device (`cuda:1`), or
 * `auto` for the best device of the machine. `options` may be NULL. The caller frees `*out` with
 * `halcyon_backend_free`.
 *
 * # Safety
 * `name` is a string, `options` are NULL or options, `out` points to a pointer.
 */
HalcyonStatus halcyon_backend_open(const char *name, const HalcyonOptions *options, HalcyonBackend **out);

/**
 * Frees a backend. NULL is allowed. Models and generators of the backend stay valid; the device is closed
 * when the last of them is freed.
 *
 * # Safety
 * `backend` is NULL or a backend that was not freed yet, and nothing uses it any more.
 */
void halcyon_backend_free(HalcyonBackend *backend);

/**
 * The name of the open device, such as `cpu:0`. The string belongs to the backend. NULL if `backend` is
 * NULL.
 *
 * # Safety
 * `backend` is NULL or a backend.
 */
const char *halcyon_backend_id(const HalcyonBackend *backend);

/**
 * The optimisation level, such as `O2`. The string belongs to the backend. NULL if `backend` is NULL.
 *
 * # Safety
 * `backend` is NULL or a backend.
 */
const char *halcyon_backend_level(const HalcyonBackend *backend);

/**
 * The report of the selection: the device, the rule that chose it, and a line for each candidate that was
 * rejected, with the reason. The string belongs to the backend. NULL if `backend` is NULL.
 *
 * # Safety
 * `backend` is NULL or a backend.
 */
const char *halcyon_backend_report(const HalcyonBackend *backend);

/**
 * A line for each option that has no effect on this device, or less effect than requested; empty if there is
 * none. The string belongs to the backend. NULL if `backend` is NULL.
 *
 * # Safety
 * `backend` is NULL or a backend.
 */
const char *halcyon_backend_warnings(const HalcyonBackend *backend);

/**
 * Looks for the devices of this machine. It may load drivers, which can take some tenths of a second. The
 * caller frees `*out` with `halcyon_devices_free`.
 *
 * # Safety
 * `out` points to a pointer.
 */
HalcyonStatus halcyon_devices_find(HalcyonDevices **out);

/**
 * Frees a list of devices and its devices. NULL is allowed.
 *
 * # Safety
 * `devices` is NULL or a list that was not freed yet, and nothing uses it any more.
 */
void halcyon_devices_free(HalcyonDevices *devices);

/**
 * The number of devices; 0 if `devices` is NULL.
 *
 * # Safety
 * `devices` is NULL or a list.
 */
size_t halcyon_devices_count(const HalcyonDevices *devices);

/**
 * The device at an index. It belongs to the list and is valid as long as the list. NULL if `devices` is NULL
 * or `index` is not less than the number of devices.
 *
 * # Safety
 * `devices` is NULL or a list.
 */
const HalcyonDevice *halcyon_devices_get(const HalcyonDevices *devices, size_t index);

/**
 * All backends as a JSON array: the output of `halcyon devices --json`. A backend without a device has the
 * reason, what was tried, and what to do about it. The string belongs to the list. NULL if `devices` is
 * NULL.
 *
 * # Safety
 * `devices` is NULL or a list.
 */
const char *halcyon_devices_json(const HalcyonDevices *devices);

/**
 * The name that opens the device, such as `cuda:0` (`halcyon_backend_open`). The string belongs to the list
 * of devices. NULL if `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
const char *halcyon_device_id(const HalcyonDevice *device);

/**
 * The name of the hardware, as its driver reports it. The string belongs to the list of devices. NULL if
 * `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
const char *halcyon_device_name(const HalcyonDevice *device);

/**
 * The vendor of the hardware; empty if the driver does not report it. The string belongs to the list of
 * devices. NULL if `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
const char *halcyon_device_vendor(const HalcyonDevice *device);

/**
 * The kind of the device, which is the name of its backend: `cpu`, `cuda`, `rocm`, `opencl`, `webgpu`. The
 * string belongs to the list of devices. NULL if `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
const char *halcyon_device_backend(const HalcyonDevice *device);

/**
 * The memory of the device in bytes; `HALCYON_UNKNOWN` if the driver does not report it, or if `device` is
 * NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
uint64_t halcyon_device_total_memory(const HalcyonDevice *device);

/**
 * The memory in bytes that was free when the device was found; `HALCYON_UNKNOWN` if the driver does not
 * report it, or if `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
uint64_t halcyon_device_free_memory(const HalcyonDevice *device);

/**
 * Whether the device is software that runs on the CPU (PoCL, lavapipe). `auto` tries such devices last.
 * False if `device` is NULL.
 *
 * # Safety
 * `device` is NULL or a device of a list that was not freed.
 */
bool halcyon_device_is_software(const HalcyonDevice *device);

/**
 * Opens a language model: a GGUF file, or a folder in Hugging Face's layout. `context` is the most tokens of
 * a prompt and its continuation together, for which memory is reserved; 0 means 4096. A model that was made
 * for fewer tokens gets no more than that. The caller frees `*out` with `halcyon_generator_free`.
 *
 * # Safety
 * `backend` is a backend, `path` is a string, `out` points to a pointer.
 */
HalcyonStatus halcyon_generator_open(const HalcyonBackend *backend,
                                     const char *path,
                                     size_t context,
                                     HalcyonGenerator **out);

/**
 * Frees a generator. NULL is allowed.
 *
 * # Safety
 * `generator` is NULL or a generator that was not freed yet, and nothing uses it any more.
 */
void halcyon_generator_free(HalcyonGenerator *generator);

/**
 * Sets the default values of options.
 *
 * # Safety
 * `options` points to a `HalcyonGenerateOptions`.
 */
HalcyonStatus halcyon_generate_options_init(HalcyonGenerateOptions *options);

/**
 * Continues a text. `on_text` receives the continuation piece by piece, with `user`. `options` may be NULL
 * for the default values; `result` may be NULL.
 *
 * # Safety
 * `generator` is a generator, `prompt` is a string, `options` is NULL or points to options, `on_text`
 * accepts `user`, `result` is NULL or points to a `HalcyonGenerated`.
 */
HalcyonStatus halcyon_generator_generate(const HalcyonGenerator *generator,
                                         const char *prompt,
                                         const HalcyonGenerateOptions *options,
                                         HalcyonTextFunction on_text,
                                         void *user,
                                         HalcyonGenerated *result);

/**
 * Answers the last of `count` messages, with the model's chat template. The other arguments are those of
 * `halcyon_generator_generate`.
 *
 * # Safety
 * `generator` is a generator, `messages` points to `count` messages of strings, `options` is NULL or points
 * to options, `on_text` accepts `user`, `result` is NULL or points to a `HalcyonGenerated`.
 */
HalcyonStatus halcyon_generator_chat(const HalcyonGenerator *generator,
                                     const HalcyonMessage *messages,
                                     size_t count,
                                     const HalcyonGenerateOptions *options,
                                     HalcyonTextFunction on_text,
                                     void *user,
                                     HalcyonGenerated *result);

/**
 * Opens an ONNX file. Weights in other files are read from the folder of the file. Nothing is compiled
 * before the first run. The caller frees `*out` with `halcyon_model_free`.
 *
 * # Safety
 * `backend` is a backend, `path` is a string, `out` points to a pointer.
 */
HalcyonStatus halcyon_model_open(const HalcyonBackend *backend, const char *path, HalcyonModel **out);

/**
 * Reads an ONNX model from memory, which is copied. The weights must be part of the model. The caller frees
 * `*out` with `halcyon_model_free`.
 *
 * # Safety
 * `backend` is a backend, `data` points to `bytes` bytes, `out` to a pointer.
 */
HalcyonStatus halcyon_model_from_bytes(const HalcyonBackend *backend,
                                       const void *data,
                                       size_t bytes,
                                       HalcyonModel **out);

/**
 * Frees a model. NULL is allowed.
 *
 * # Safety
 * `model` is NULL or a model that was not freed yet, and nothing uses it any more.
 */
void halcyon_model_free(HalcyonModel *model);

/**
 * The number of inputs; 0 if `model` is NULL.
 *
 * # Safety
 * `model` is NULL or a model.
 */
size_t halcyon_model_input_count(const HalcyonModel *model);

/**
 * The number of outputs; 0 if `model` is NULL.
 *
 * # Safety
 * `model` is NULL or a model.
 */
size_t halcyon_model_output_count(const HalcyonModel *model);

/**
 * The input at an index, in the model's order. It belongs to the model and is valid as long as the model.
 * NULL if `model` is NULL or `index` is not less than the number of inputs.
 *
 * # Safety
 * `model` is NULL or a model.
 */
const HalcyonPort *halcyon_model_input(const HalcyonModel *model, size_t index);

/**
 * The output at an index, in the model's order. It belongs to the model and is valid as long as the model.
 * NULL if `model` is NULL or `index` is not less than the number of outputs.
 *
 * # Safety
 * `model` is NULL or a model.
 */
const HalcyonPort *halcyon_model_output(const HalcyonModel *model, size_t index);

/**
 * The name of an input or output. The string belongs to the model. NULL if `port` is NULL.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
const char *halcyon_port_name(const HalcyonPort *port);

/**
 * The type of an input or output as text, such as `f32[batch, 3, 224, 224]` or `unknown before a run`. The
 * string belongs to the model. NULL if `port` is NULL.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
const char *halcyon_port_description(const HalcyonPort *port);

/**
 * The kind of the value; `HALCYON_PORT_KIND_NONE` if `port` is NULL.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
HalcyonPortKind halcyon_port_kind(const HalcyonPort *port);

/**
 * The element type (`HalcyonDtype`) of a tensor; `HALCYON_DTYPE_NONE` if the value is no tensor, if its type
 * is not known before a run, or if `port` is NULL.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
int32_t halcyon_port_dtype(const HalcyonPort *port);

/**
 * The number of dimensions; -1 if the model leaves it open, if the value is no tensor, if its type is not
 * known before a run, or if `port` is NULL.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
int64_t halcyon_port_rank(const HalcyonPort *port);

/**
 * The size of a dimension; -1 if it is not fixed (`halcyon_port_dim_name`), if `port` is NULL, or if there
 * is no such dimension.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
int64_t halcyon_port_dim(const HalcyonPort *port, size_t axis);

/**
 * The text of a dimension: its size, or the symbol that stands for a size that is not fixed. Inputs in which
 * the same symbol occurs are meant to have the same size there. Other sizes are an error of a run only where
 * an operator needs them to be equal. The string belongs to the model. NULL if `port` is NULL, or if there
 * is no such dimension.
 *
 * # Safety
 * `port` is NULL or a port of a model that was not freed.
 */
const char *halcyon_port_dim_name(const HalcyonPort *port, size_t axis);

/**
 * Runs a model and waits for its results. `inputs` has `count` tensors. `names` has their names in the same
 * order; if it is NULL, the tensors are in the model's order. `outputs` has room for `output_count` tensors,
 * which must be the number of the model's outputs; the results are in the model's order. The caller frees
 * each of them with `halcyon_tensor_free`. If the call fails, all of them are NULL.
 *
 * The first run with new sizes of inputs compiles the model for these sizes.
 *
 * # Safety
 * `model` is a model, `names` is NULL or points to `count` strings, `inputs` points to `count` tensors, and
 * `outputs` to `output_count` pointers.
 */
HalcyonStatus halcyon_model_run(const HalcyonModel *model,
                                const char *const *names,
                                const HalcyonTensor *const *inputs,
                                size_t count,
                                HalcyonTensor **outputs,
                                size_t output_count);

/**
 * Computes the memory that a run with these inputs needs. The arguments are those of `halcyon_model_run`. A
 * model that runs in stages, because computed values control it, is `HALCYON_STATUS_UNSUPPORTED`: the
 * memory of the later stages depends on values that only a run computes.
 *
 * # Safety
 * `model` is a model, `names` is NULL or points to `count` strings, `inputs` points to `count` tensors,
 * `out` to a `HalcyonFit`.
 */
HalcyonStatus halcyon_model_fit(const HalcyonModel *model,
                                const char *const *names,
                                const HalcyonTensor *const *inputs,
                                size_t count,
                                HalcyonFit *out);

/**
 * The name of an element type, such as `f32`. `unknown` for a number that is not in `HalcyonDtype`. Never
 * NULL. The string is valid for ever.
 */
const char *halcyon_dtype_name(int32_t dtype);

/**
 * The bits of an element; 0 for text and for a number that is not an element type.
 */
size_t halcyon_dtype_bits(int32_t dtype);

/**
 * Makes a tensor of numbers by copying them. `dtype` is a `HalcyonDtype`; `dims` has `rank` sizes, and may
 * be NULL for a scalar (`rank` 0). `data` has the elements in row-major order, little-endian, and `bytes` is
 * their exact size; `data` may be NULL if there are none. The caller frees `*out` with
 * `halcyon_tensor_free`.
 *
 * # Safety
 * `dims` points to `rank` numbers, `data` to `bytes` bytes, `out` to a pointer.
 */
HalcyonStatus halcyon_tensor_new(int32_t dtype,
                                 const int64_t *dims,
                                 size_t rank,
                                 const void *data,
                                 size_t bytes,
                                 HalcyonTensor **out);

/**
 * Makes a tensor of text by copying it. `dims` has `rank` sizes; `strings` has `count` strings in row-major
 * order, as many as the sizes say. The caller frees `*out` with `halcyon_tensor_free`.
 *
 * # Safety
 * `dims` points to `rank` numbers, `strings` to `count` strings, `out` to a pointer.
 */
HalcyonStatus halcyon_tensor_from_strings(const int64_t *dims,
                                          size_t rank,
                                          const char *const *strings,
                                          size_t count,
                                          HalcyonTensor **out);

/**
 * Frees a tensor. NULL is allowed.
 *
 * # Safety
 * `tensor` is NULL or a tensor that was not freed yet, and nothing uses it any more.
 */
void halcyon_tensor_free(HalcyonTensor *tensor);

/**
 * The element type of a tensor; `HALCYON_DTYPE_NONE` if `tensor` is NULL.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
int32_t halcyon_tensor_dtype(const HalcyonTensor *tensor);

/**
 * The number of dimensions; 0 if `tensor` is NULL.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
size_t halcyon_tensor_rank(const HalcyonTensor *tensor);

/**
 * The sizes, as many as `halcyon_tensor_rank` says. They belong to the tensor. NULL if `tensor` is NULL.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
const int64_t *halcyon_tensor_dims(const HalcyonTensor *tensor);

/**
 * The number of elements; 0 if `tensor` is NULL.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
size_t halcyon_tensor_count(const HalcyonTensor *tensor);

/**
 * The elements of a tensor of numbers, in row-major order, little-endian. The address is a multiple of 16.
 * The memory belongs to the tensor and must not be written. NULL if `tensor` is NULL or holds text.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
const void *halcyon_tensor_data(const HalcyonTensor *tensor);

/**
 * The size of the elements of a tensor of numbers in bytes; 0 if `tensor` is NULL or holds text.
 *
 * # Safety
 * `tensor` is NULL or a tensor.
 */
size_t halcyon_tensor_bytes(const HalcyonTensor *tensor);

/**
 * The string at an index in row-major order. It belongs to the tensor and ends with NUL; if `length` is not
 * NULL, `*length` is its length in bytes, because the text may contain NUL. NULL if `tensor` is NULL or
 * holds numbers, or if there is no such string.
 *
 * # Safety
 * `tensor` is NULL or a tensor, `length` is NULL or points to a number.
 */
const char *halcyon_tensor_string(const HalcyonTensor *tensor, size_t index, size_t *length);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* HALCYON_H */
