// The C++ interface of Halcyon: halcyon.h with handles that free themselves, and exceptions. It needs C++17
// and no library besides libhalcyon.
//
// Handles can be moved but not copied. Strings that methods return as `const char *` belong to the handle. A
// method throws `halcyon::Error` on failure, also if the object was moved from. The rules for threads are those
// of halcyon.h.

#ifndef HALCYON_HPP
#define HALCYON_HPP

#include "halcyon.h"

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace halcyon {

/// A failure: its text and its status.
class Error : public std::runtime_error {
public:
    Error(HalcyonStatus status, const std::string &text) : std::runtime_error(text), status_(status) {}

    HalcyonStatus status() const noexcept { return status_; }

private:
    HalcyonStatus status_;
};

namespace detail {

/// Throws if a function failed.
inline void check(HalcyonStatus status) {
    if (status != HALCYON_STATUS_OK) {
        throw Error(status, halcyon_last_error());
    }
}

/// Throws if a function returned NULL.
template <class T>
const T *check(const T *value) {
    if (value == nullptr) {
        throw Error(halcyon_last_status(), halcyon_last_error());
    }
    return value;
}

/// The pointer of an object. An object that was moved from has none, which is an error: the C functions would
/// return 0, or use the default options.
template <class T>
T *live(T *handle, const char *what) {
    if (handle == nullptr) {
        throw Error(HALCYON_STATUS_ARGUMENT, std::string("`") + what + "` is NULL, or it was moved from");
    }
    return handle;
}

/// The characters of a string. A string with NUL is an error, because C would read only its beginning.
inline const char *c_str(const std::string &text) {
    if (text.find('\0') != std::string::npos) {
        throw Error(HALCYON_STATUS_ARGUMENT, "a string has NUL after \"" + std::string(text.c_str()) + "\"");
    }
    return text.c_str();
}

/// Frees a handle with its function.
template <class T, void (*Free)(T *)>
struct Deleter {
    void operator()(T *handle) const noexcept { Free(handle); }
};

template <class T, void (*Free)(T *)>
using Handle = std::unique_ptr<T, Deleter<T, Free>>;

}  // namespace detail

/// The version of Halcyon.
inline std::string version() {
    return halcyon_version();
}

/// Throws if the loaded library has another interface than this header.
inline void check_abi() {
    const std::uint32_t loaded = halcyon_abi_version();
    if (loaded != HALCYON_ABI_VERSION) {
        throw Error(HALCYON_STATUS_UNSUPPORTED,
                    "the loaded libhalcyon has interface " + std::to_string(loaded) +
                        ", and the program was built for " + std::to_string(HALCYON_ABI_VERSION));
    }
}

/// Sets the program that probes drivers (halcyon_set_probe_program).
inline void set_probe_program(const std::string &path) {
    detail::check(halcyon_set_probe_program(detail::c_str(path)));
}

/// A device of the machine. It is valid as long as its `Devices`.
class Device {
public:
    explicit Device(const HalcyonDevice *device) : device_(detail::live(device, "device")) {}

    const char *id() const { return detail::check(halcyon_device_id(device_)); }
    const char *name() const { return detail::check(halcyon_device_name(device_)); }
    const char *vendor() const { return detail::check(halcyon_device_vendor(device_)); }
    const char *backend() const { return detail::check(halcyon_device_backend(device_)); }
    /// Bytes, or HALCYON_UNKNOWN.
    std::uint64_t total_memory() const { return halcyon_device_total_memory(device_); }
    std::uint64_t free_memory() const { return halcyon_device_free_memory(device_); }
    bool is_software() const { return halcyon_device_is_software(device_); }

private:
    const HalcyonDevice *device_;
};

/// The devices of the machine.
class Devices {
public:
    Devices() {
        HalcyonDevices *out = nullptr;
        detail::check(halcyon_devices_find(&out));
        handle_.reset(out);
    }

    std::size_t size() const { return halcyon_devices_count(detail::live(handle_.get(), "devices")); }
    Device operator[](std::size_t index) const {
        return Device(detail::check(halcyon_devices_get(handle_.get(), index)));
    }
    /// All backends, with the reason for each that has no device.
    const char *json() const { return detail::check(halcyon_devices_json(handle_.get())); }

private:
    detail::Handle<HalcyonDevices, halcyon_devices_free> handle_;
};

/// Options of a backend. The methods return the object, so that calls can be chained.
class Options {
public:
    Options() {
        HalcyonOptions *out = nullptr;
        detail::check(halcyon_options_new(&out));
        handle_.reset(out);
    }

    Options &threads(std::size_t count) { return done(halcyon_options_set_threads(handle_.get(), count)); }
    Options &level(const std::string &level) {
        return done(halcyon_options_set_level(handle_.get(), detail::c_str(level)));
    }
    Options &precision(const std::string &precision) {
        return done(halcyon_options_set_precision(handle_.get(), detail::c_str(precision)));
    }
    Options &memory_limit(std::uint64_t bytes) {
        return done(halcyon_options_set_memory_limit(handle_.get(), bytes));
    }
    Options &memory_needed(std::uint64_t bytes) {
        return done(halcyon_options_set_memory_needed(handle_.get(), bytes));
    }
    const HalcyonOptions *get() const noexcept { return handle_.get(); }

private:
    Options &done(HalcyonStatus status) {
        detail::check(status);
        return *this;
    }

    detail::Handle<HalcyonOptions, halcyon_options_free> handle_;
};

/// An open device.
class Backend {
public:
    /// Opens a device by its name; `auto` stands for the best one.
    explicit Backend(const std::string &name = "auto") { open(name, nullptr); }
    Backend(const std::string &name, const Options &options) {
        open(name, detail::live(options.get(), "options"));
    }

    const char *id() const { return detail::check(halcyon_backend_id(handle_.get())); }
    const char *level() const { return detail::check(halcyon_backend_level(handle_.get())); }
    /// Why this device was chosen.
    const char *report() const { return detail::check(halcyon_backend_report(handle_.get())); }
    /// The options without effect, one per line.
    const char *warnings() const { return detail::check(halcyon_backend_warnings(handle_.get())); }
    const HalcyonBackend *get() const noexcept { return handle_.get(); }

private:
    void open(const std::string &name, const HalcyonOptions *options) {
        HalcyonBackend *out = nullptr;
        detail::check(halcyon_backend_open(detail::c_str(name), options, &out));
        handle_.reset(out);
    }

    detail::Handle<HalcyonBackend, halcyon_backend_free> handle_;
};

/// The element type of a C++ type.
template <class T>
struct dtype_of;
template <>
struct dtype_of<float> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_F32> {};
template <>
struct dtype_of<double> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_F64> {};
template <>
struct dtype_of<bool> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_BOOL> {};
template <>
struct dtype_of<std::int8_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_I8> {};
template <>
struct dtype_of<std::int16_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_I16> {};
template <>
struct dtype_of<std::int32_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_I32> {};
template <>
struct dtype_of<std::int64_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_I64> {};
template <>
struct dtype_of<std::uint8_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_U8> {};
template <>
struct dtype_of<std::uint16_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_U16> {};
template <>
struct dtype_of<std::uint32_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_U32> {};
template <>
struct dtype_of<std::uint64_t> : std::integral_constant<HalcyonDtype, HALCYON_DTYPE_U64> {};

/// Elements that belong to a tensor.
template <class T>
class View {
public:
    View(const T *data, std::size_t size) : data_(data), size_(size) {}

    const T *data() const noexcept { return data_; }
    std::size_t size() const noexcept { return size_; }
    const T *begin() const noexcept { return data_; }
    const T *end() const noexcept { return data_ + size_; }
    const T &operator[](std::size_t index) const { return data_[index]; }

private:
    const T *data_;
    std::size_t size_;
};

/// A tensor in host memory.
class Tensor {
public:
    /// Copies elements of any type; `dtype` is a HalcyonDtype.
    Tensor(std::int32_t dtype, const std::vector<std::int64_t> &dims, const void *data, std::size_t bytes) {
        HalcyonTensor *out = nullptr;
        detail::check(halcyon_tensor_new(dtype, dims.data(), dims.size(), data, bytes, &out));
        handle_.reset(out);
    }

    /// Copies elements; their number must be the product of the sizes.
    template <class T>
    static Tensor of(const std::vector<std::int64_t> &dims, const T *data, std::size_t count) {
        if (count > SIZE_MAX / sizeof(T)) {
            throw Error(HALCYON_STATUS_SHAPE, "the elements are larger than the address space");
        }
        return Tensor(dtype_of<T>::value, dims, data, count * sizeof(T));
    }
    template <class T>
    static Tensor of(const std::vector<std::int64_t> &dims, const std::vector<T> &values) {
        return of(dims, values.data(), values.size());
    }

    /// A tensor of text.
    static Tensor strings(const std::vector<std::int64_t> &dims, const std::vector<std::string> &values) {
        std::vector<const char *> pointers;
        for (const std::string &value : values) {
            pointers.push_back(detail::c_str(value));
        }
        HalcyonTensor *out = nullptr;
        detail::check(
            halcyon_tensor_from_strings(dims.data(), dims.size(), pointers.data(), pointers.size(), &out));
        return Tensor(out);
    }

    /// Takes a handle over.
    explicit Tensor(HalcyonTensor *handle) : handle_(handle) {}

    HalcyonDtype dtype() const { return static_cast<HalcyonDtype>(halcyon_tensor_dtype(live())); }
    std::vector<std::int64_t> dims() const {
        const std::size_t rank = halcyon_tensor_rank(live());
        const std::int64_t *dims = detail::check(halcyon_tensor_dims(live()));
        return std::vector<std::int64_t>(dims, dims + rank);
    }
    /// The number of elements.
    std::size_t size() const { return halcyon_tensor_count(live()); }
    std::size_t bytes() const { return halcyon_tensor_bytes(live()); }
    const void *raw() const { return detail::check(halcyon_tensor_data(handle_.get())); }

    /// The elements, which must have this type.
    template <class T>
    View<T> data() const {
        if (dtype() != dtype_of<T>::value) {
            throw Error(HALCYON_STATUS_DTYPE, std::string("the tensor holds ") + halcyon_dtype_name(dtype()) +
                                                  ", not " + halcyon_dtype_name(dtype_of<T>::value));
        }
        return View<T>(static_cast<const T *>(raw()), size());
    }

    /// A string of a tensor of text.
    std::string_view string(std::size_t index) const {
        std::size_t length = 0;
        const char *text = detail::check(halcyon_tensor_string(handle_.get(), index, &length));
        return std::string_view(text, length);
    }
    const HalcyonTensor *get() const noexcept { return handle_.get(); }

private:
    const HalcyonTensor *live() const { return detail::live(handle_.get(), "tensor"); }

    detail::Handle<HalcyonTensor, halcyon_tensor_free> handle_;
};

/// An input or output of a model. It is valid as long as its `Model`.
class Port {
public:
    explicit Port(const HalcyonPort *port) : port_(detail::live(port, "port")) {}

    const char *name() const { return detail::check(halcyon_port_name(port_)); }
    const char *description() const { return detail::check(halcyon_port_description(port_)); }
    HalcyonPortKind kind() const { return halcyon_port_kind(port_); }
    HalcyonDtype dtype() const { return static_cast<HalcyonDtype>(halcyon_port_dtype(port_)); }
    /// -1 if the rank is open, or the type is unknown before a run.
    std::int64_t rank() const { return halcyon_port_rank(port_); }
    /// -1 if the size is not fixed.
    std::int64_t dim(std::size_t axis) const {
        detail::check(halcyon_port_dim_name(port_, axis));
        return halcyon_port_dim(port_, axis);
    }
    const char *dim_name(std::size_t axis) const { return detail::check(halcyon_port_dim_name(port_, axis)); }

private:
    const HalcyonPort *port_;
};

/// An input by its name.
using Input = std::pair<std::string, std::reference_wrapper<const Tensor>>;

/// An ONNX model.
class Model {
public:
    Model(const Backend &backend, const std::string &path) {
        HalcyonModel *out = nullptr;
        detail::check(halcyon_model_open(backend.get(), detail::c_str(path), &out));
        handle_.reset(out);
    }
    Model(const Backend &backend, const void *data, std::size_t bytes) {
        HalcyonModel *out = nullptr;
        detail::check(halcyon_model_from_bytes(backend.get(), data, bytes, &out));
        handle_.reset(out);
    }

    std::size_t input_count() const { return halcyon_model_input_count(live()); }
    std::size_t output_count() const { return halcyon_model_output_count(live()); }
    Port input(std::size_t index) const {
        return Port(detail::check(halcyon_model_input(handle_.get(), index)));
    }
    Port output(std::size_t index) const {
        return Port(detail::check(halcyon_model_output(handle_.get(), index)));
    }

    /// Runs the model on inputs with names. The results are in the model's order.
    std::vector<Tensor> run(const std::vector<Input> &inputs) const {
        const Given given(inputs);
        return run(given.names.data(), given.tensors);
    }
    /// Runs the model on inputs in the model's order.
    std::vector<Tensor> run_in_order(const std::vector<std::reference_wrapper<const Tensor>> &inputs) const {
        std::vector<const HalcyonTensor *> tensors;
        for (const Tensor &tensor : inputs) {
            tensors.push_back(tensor.get());
        }
        return run(nullptr, tensors);
    }

    /// The memory that a run with these inputs needs.
    HalcyonFit fit(const std::vector<Input> &inputs) const {
        const Given given(inputs);
        HalcyonFit fit = {};
        detail::check(halcyon_model_fit(handle_.get(), given.names.data(), given.tensors.data(),
                                        given.tensors.size(), &fit));
        return fit;
    }

private:
    const HalcyonModel *live() const { return detail::live(handle_.get(), "model"); }

    struct Given {
        explicit Given(const std::vector<Input> &inputs) {
            for (const Input &input : inputs) {
                names.push_back(detail::c_str(input.first));
                tensors.push_back(input.second.get().get());
            }
            // Without a name the C function would take the inputs in the model's order.
            names.push_back(nullptr);
        }

        std::vector<const char *> names;
        std::vector<const HalcyonTensor *> tensors;
    };

    std::vector<Tensor> run(const char *const *names,
                            const std::vector<const HalcyonTensor *> &tensors) const {
        std::vector<HalcyonTensor *> made(output_count(), nullptr);
        std::vector<Tensor> outputs;
        outputs.reserve(made.size());
        detail::check(halcyon_model_run(handle_.get(), names, tensors.data(), tensors.size(), made.data(),
                                        made.size()));
        for (HalcyonTensor *tensor : made) {
            outputs.emplace_back(tensor);
        }
        return outputs;
    }

    detail::Handle<HalcyonModel, halcyon_model_free> handle_;
};

/// How text is generated, with the default values.
struct GenerateOptions {
    GenerateOptions() { detail::check(halcyon_generate_options_init(&values)); }

    /// The fields of the C structure. `stop` and `stop_count` are set from `stop_texts`.
    HalcyonGenerateOptions values;
    std::vector<std::string> stop_texts;
};

/// A language model.
class Generator {
public:
    /// Receives text as soon as it is final; false ends the generation. It may throw.
    using OnText = std::function<bool(std::string_view)>;

    /// `context`: the most tokens of a prompt and its continuation; 0: halcyon_generator_open's default.
    Generator(const Backend &backend, const std::string &path, std::size_t context = 0) {
        HalcyonGenerator *out = nullptr;
        detail::check(halcyon_generator_open(backend.get(), detail::c_str(path), context, &out));
        handle_.reset(out);
    }

    /// Continues a text.
    HalcyonGenerated generate(const std::string &prompt, const GenerateOptions &options,
                              const OnText &on_text) const {
        return call(options, on_text, [&](auto *values, void *user, auto *result) {
            return halcyon_generator_generate(handle_.get(), detail::c_str(prompt), values, receive, user,
                                              result);
        });
    }
    /// The continuation of a text.
    std::string generate(const std::string &prompt, const GenerateOptions &options = {}) const {
        std::string text;
        generate(prompt, options, [&](std::string_view piece) {
            text += piece;
            return true;
        });
        return text;
    }

    /// Answers the last message. A message is a role and a text.
    HalcyonGenerated chat(const std::vector<std::pair<std::string, std::string>> &messages,
                          const GenerateOptions &options, const OnText &on_text) const {
        std::vector<HalcyonMessage> list;
        for (const auto &message : messages) {
            list.push_back({detail::c_str(message.first), detail::c_str(message.second)});
        }
        return call(options, on_text, [&](auto *values, void *user, auto *result) {
            return halcyon_generator_chat(handle_.get(), list.data(), list.size(), values, receive, user,
                                          result);
        });
    }

private:
    struct Receiver {
        const OnText &on_text;
        std::exception_ptr thrown;
    };

    /// The function that the library calls. Exceptions must not pass through the library.
    static bool receive(const char *text, std::size_t length, void *user) noexcept {
        Receiver &receiver = *static_cast<Receiver *>(user);
        try {
            return receiver.on_text(std::string_view(text, length));
        } catch (...) {
            receiver.thrown = std::current_exception();
            return false;
        }
    }

    template <class F>
    static HalcyonGenerated call(const GenerateOptions &options, const OnText &on_text, F &&function) {
        std::vector<const char *> stop;
        for (const std::string &text : options.stop_texts) {
            stop.push_back(detail::c_str(text));
        }
        HalcyonGenerateOptions values = options.values;
        values.stop = stop.data();
        values.stop_count = stop.size();
        Receiver receiver{on_text, nullptr};
        HalcyonGenerated result = {};
        const HalcyonStatus status = function(&values, &receiver, &result);
        if (receiver.thrown) {
            std::rethrow_exception(receiver.thrown);
        }
        detail::check(status);
        return result;
    }

    detail::Handle<HalcyonGenerator, halcyon_generator_free> handle_;
};

}  // namespace halcyon

#endif  // HALCYON_HPP
