// The C++ interface: `wrapper DIGITS.onnx FOLDER_OF_TEST_MODELS [STORIES.gguf]`.

#include "halcyon.hpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#define CHECK(condition)                                                         \
    do {                                                                         \
        if (!(condition)) {                                                      \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                        \
        }                                                                        \
    } while (0)

/// The call throws an error with this status, whose text contains `part`.
template <class F>
static void fails(HalcyonStatus status, const std::string &part, F &&call) {
    try {
        call();
    } catch (const halcyon::Error &e) {
        if (e.status() == status && std::string(e.what()).find(part) != std::string::npos) {
            return;
        }
        std::fprintf(stderr, "expected %s, \"%s\"; got %s: %s\n", halcyon_status_name(status), part.c_str(),
                     halcyon_status_name(e.status()), e.what());
        std::exit(1);
    }
    std::fprintf(stderr, "nothing was thrown; expected \"%s\"\n", part.c_str());
    std::exit(1);
}

template <class T>
constexpr bool MOVES_ONLY = std::is_nothrow_move_constructible_v<T> && std::is_nothrow_move_assignable_v<T> &&
                            !std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>;
static_assert(MOVES_ONLY<halcyon::Devices> && MOVES_ONLY<halcyon::Options> && MOVES_ONLY<halcyon::Backend>);
static_assert(MOVES_ONLY<halcyon::Tensor> && MOVES_ONLY<halcyon::Model> && MOVES_ONLY<halcyon::Generator>);

static void devices() {
    CHECK(halcyon::version() == halcyon_version());
    halcyon::check_abi();
    const halcyon::Devices all;
    bool cpu = false;
    for (std::size_t i = 0; i < all.size(); i++) {
        const halcyon::Device d = all[i];
        cpu = cpu || std::string(d.id()) == "cpu:0";
        CHECK(std::string(d.id()).rfind(d.backend(), 0) == 0 && *d.name() != '\0' && d.vendor() != nullptr);
        CHECK(d.total_memory() > 0 && d.free_memory() > 0 && (d.is_software() || !d.is_software()));
    }
    CHECK(cpu && std::string(all.json()).find("\"tpu\"") != std::string::npos);
    fails(HALCYON_STATUS_ARGUMENT, "`index` is", [&] { all[all.size()]; });

    halcyon::Options options;
    options.level("O1").threads(2).memory_limit(1 << 28).memory_needed(1).precision("f32");
    halcyon::Backend backend("cpu", options);
    CHECK(std::string(backend.id()) == "cpu:0" && std::string(backend.level()) == "O1");
    CHECK(std::string(backend.report()).find("cpu was requested") != std::string::npos);
    CHECK(std::string(backend.warnings()).empty());
    fails(HALCYON_STATUS_ARGUMENT, "\"O7\" is not a level", [&] { options.level("O7"); });
    fails(HALCYON_STATUS_ARGUMENT, "abacus", [] { halcyon::Backend("abacus"); });
    fails(HALCYON_STATUS_ARGUMENT, "NUL after \"cp\"", [] { halcyon::Backend(std::string("cp\0u", 4)); });
    fails(HALCYON_STATUS_ARGUMENT, "there is no file", [] { halcyon::set_probe_program("no/such/file"); });
    // A handle that was moved from is empty, which is an error and no crash.
    const halcyon::Backend moved = std::move(backend);
    CHECK(std::string(moved.id()) == "cpu:0");
    fails(HALCYON_STATUS_ARGUMENT, "`backend` is NULL", [&] { backend.id(); });
    fails(HALCYON_STATUS_ARGUMENT, "`backend` is NULL", [&] { halcyon::Model(backend, "digits.onnx"); });
    halcyon::Devices there;
    const halcyon::Devices devices = std::move(there);
    CHECK(devices.size() == all.size());
    fails(HALCYON_STATUS_ARGUMENT, "`devices` is NULL", [&] { there.size(); });
    fails(HALCYON_STATUS_ARGUMENT, "`devices` is NULL", [&] { there[0]; });
    fails(HALCYON_STATUS_ARGUMENT, "`device` is NULL", [] { halcyon::Device(nullptr).total_memory(); });
    // For the C function, NULL stands for the default options.
    const halcyon::Options taken = std::move(options);
    CHECK(std::string(halcyon::Backend("cpu", taken).level()) == "O1");
    fails(HALCYON_STATUS_ARGUMENT, "`options` is NULL", [&] { halcyon::Backend("cpu", options); });
    fails(HALCYON_STATUS_ARGUMENT, "`options` is NULL", [&] { options.threads(1); });
    CHECK(std::string(halcyon::Backend().report()).find(halcyon::Backend().id()) != std::string::npos);
}

static void tensors() {
    const auto t = halcyon::Tensor::of<std::int32_t>({2, 2}, {1, 2, 3, 4});
    CHECK(t.dtype() == HALCYON_DTYPE_I32 && t.size() == 4 && t.bytes() == 16);
    CHECK(t.dims() == std::vector<std::int64_t>({2, 2}));
    const auto view = t.data<std::int32_t>();
    CHECK(std::vector<std::int32_t>(view.begin(), view.end()) == std::vector<std::int32_t>({1, 2, 3, 4}));
    CHECK(view.size() == 4 && view[3] == 4 && view.data() == t.raw());
    fails(HALCYON_STATUS_DTYPE, "the tensor holds i32, not f32", [&] { t.data<float>(); });
    fails(HALCYON_STATUS_SHAPE, "takes 12", [] { halcyon::Tensor::of<float>({3}, {1, 2}); });
    fails(HALCYON_STATUS_SHAPE, "address space", [] {
        const float one = 1;
        halcyon::Tensor::of(std::vector<std::int64_t>{1}, &one, SIZE_MAX / 2);
    });
    const bool flags[2] = {true, false};
    CHECK(!halcyon::Tensor::of<bool>({2}, flags, 2).data<bool>()[1]);
    const unsigned char packed[1] = {0x21};
    CHECK(halcyon::Tensor(HALCYON_DTYPE_U4, {2}, packed, 1).size() == 2);
    CHECK(halcyon::Tensor::of<double>({}, {2.5}).dims().empty());

    const auto text = halcyon::Tensor::strings({2}, {"a", "bc"});
    CHECK(text.dtype() == HALCYON_DTYPE_STRING && text.string(1) == "bc");
    fails(HALCYON_STATUS_ARGUMENT, "`index` is 2", [&] { text.string(2); });
    fails(HALCYON_STATUS_DTYPE, "`tensor` holds text", [&] { text.raw(); });
    fails(HALCYON_STATUS_ARGUMENT, "NUL after",
          [] { halcyon::Tensor::strings({1}, {std::string("a\0b", 3)}); });

    // A tensor that was moved from has neither a type nor sizes.
    auto source = halcyon::Tensor::of<float>({2}, {1, 2});
    const halcyon::Tensor moved = std::move(source);
    CHECK(moved.size() == 2);
    const std::string null = "`tensor` is NULL";
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.size(); });
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.bytes(); });
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.dtype(); });
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.dims(); });
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.data<float>(); });
    fails(HALCYON_STATUS_ARGUMENT, null, [&] { source.string(0); });
}

static float grey_nine(const halcyon::Model &model) {
    const auto image = halcyon::Tensor::of<float>({1, 1, 8, 8}, std::vector<float>(64, 0.5F));
    const auto outputs = model.run({{"image", image}});
    CHECK(outputs.size() == 1 && outputs[0].dims() == std::vector<std::int64_t>({1, 10}));
    return outputs[0].data<float>()[1];
}

static void models(const std::string &digits, const std::string &folder) {
    const halcyon::Backend backend("cpu");
    const halcyon::Model model(backend, digits);
    CHECK(std::fabs(grey_nine(model) - 9.1201401e-01F) < 1e-5F);
    const halcyon::Port in = model.input(0);
    CHECK(std::string(in.name()) == "image" && in.rank() == 4 && in.dim(0) == -1 && in.dim(2) == 8);
    CHECK(std::string(in.dim_name(0)) == "batch" && in.kind() == HALCYON_PORT_KIND_TENSOR);
    CHECK(in.dtype() == HALCYON_DTYPE_F32 && std::string(in.description()) == "f32[batch, 1, 8, 8]");
    CHECK(model.input_count() == 1 && model.output_count() == 1);
    CHECK(std::string(model.output(0).name()) == "probabilities");
    fails(HALCYON_STATUS_ARGUMENT, "`axis` is 9", [&] { in.dim(9); });
    fails(HALCYON_STATUS_ARGUMENT, "`index` is 3", [&] { model.input(3); });

    const auto image = halcyon::Tensor::of<float>({1, 1, 8, 8}, std::vector<float>(64, 0.5F));
    CHECK(model.run_in_order({image}).at(0).size() == 10);
    const HalcyonFit fit = model.fit({{"image", image}});
    CHECK(fit.fits && fit.device > 0);
    fails(HALCYON_STATUS_ARGUMENT, "no input \"x\"", [&] { model.run({{"x", image}}); });
    fails(HALCYON_STATUS_ARGUMENT, "\"image\" is missing", [&] { model.run({}); });
    fails(HALCYON_STATUS_ARGUMENT, "0 inputs were given", [&] { model.run_in_order({}); });
    fails(HALCYON_STATUS_IO, "nowhere.onnx", [&] { halcyon::Model(backend, "nowhere.onnx"); });
    fails(HALCYON_STATUS_UNSUPPORTED, "Frobnicate",
          [&] { halcyon::Model(backend, folder + "/unknown.onnx"); });

    std::ifstream file(digits, std::ios::binary);
    const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
    CHECK(grey_nine(halcyon::Model(backend, bytes.data(), bytes.size())) == grey_nine(model));
    fails(HALCYON_STATUS_FORMAT, "the model in memory",
          [&] { halcyon::Model(backend, bytes.data(), bytes.size() / 2); });

    halcyon::Model source(backend, digits);
    const halcyon::Model moved = std::move(source);
    CHECK(moved.input_count() == 1);
    fails(HALCYON_STATUS_ARGUMENT, "`model` is NULL", [&] { source.input_count(); });
    fails(HALCYON_STATUS_ARGUMENT, "`model` is NULL", [&] { source.output_count(); });
    fails(HALCYON_STATUS_ARGUMENT, "`model` is NULL", [&] { source.run_in_order({image}); });
    fails(HALCYON_STATUS_ARGUMENT, "`port` is NULL", [] { halcyon::Port(nullptr).kind(); });

    // The outputs' types are not declared, and only a run knows them.
    const halcyon::Model untyped(backend, folder + "/untyped.onnx");
    CHECK(untyped.output(0).kind() == HALCYON_PORT_KIND_UNKNOWN && untyped.output(0).rank() == -1);
    const auto x = halcyon::Tensor::of<float>({6}, {1, 2, 3, 4, 5, 6});
    const auto s = halcyon::Tensor::of<std::int64_t>({2}, {2, 3});
    CHECK(untyped.run({{"s", s}, {"x", x}}).at(0).dims() == std::vector<std::int64_t>({2, 3}));

    // Threads share the model, and each has its own errors.
    const float expected = grey_nine(model);
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; i++) {
        threads.emplace_back([&model, &image, expected, i] {
            const std::string name = "input" + std::to_string(i);
            for (int k = 0; k < 20; k++) {
                CHECK(grey_nine(model) == expected);
                fails(HALCYON_STATUS_ARGUMENT, "\"" + name + "\"", [&] { model.run({{name, image}}); });
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
}

static void language(const std::string &path) {
    const halcyon::Backend backend("cpu");
    const halcyon::Generator generator(backend, path, 128);
    halcyon::GenerateOptions options;
    options.values.temperature = 0;
    options.values.max_tokens = 8;
    const std::string story = generator.generate("Once upon a time", options);
    CHECK(story.rfind(", there was a", 0) == 0);
    options.stop_texts = {" was"};
    CHECK(generator.generate("Once upon a time", options) == ", there");
    const HalcyonGenerated made =
        generator.generate("Once upon a time", options, [](std::string_view) { return false; });
    CHECK(made.finish == HALCYON_FINISH_CANCELLED && made.tokens > 0);
    // An exception of the function reaches the caller, and the generator works on.
    bool thrown = false;
    try {
        generator.generate("Once upon a time", options,
                           [](std::string_view) -> bool { throw std::runtime_error("enough"); });
    } catch (const std::runtime_error &e) {
        thrown = std::string(e.what()) == "enough";
    }
    CHECK(thrown);
    CHECK(generator.generate("Once upon a time", options) == ", there");
    fails(HALCYON_STATUS_UNSUPPORTED, "chat template",
          [&] { generator.chat({{"user", "Hello"}}, options, [](std::string_view) { return true; }); });
}

int main(int argc, char **argv) {
    CHECK(argc >= 3);
    devices();
    tensors();
    models(argv[1], argv[2]);
    if (argc > 3) {
        language(argv[3]);
    }
    std::puts("done");
    return 0;
}
