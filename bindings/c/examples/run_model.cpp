// Runs the digit classifier and prints the probability of each digit.
//
// c++ -std=c++17 examples/run_model.cpp -Iinclude -Ltarget/release -lhalcyon -o run_model_cpp
// LD_LIBRARY_PATH=target/release ./run_model_cpp ../../models/digits.onnx [DEVICE]

#include "halcyon.hpp"

#include <cstdio>
#include <vector>

// A handwritten seven.
static const std::vector<float> SEVEN = {
    0, 0,  2, 13, 16, 16,  7, 0,
    0, 0, 12, 15, 12, 16, 10, 0,
    0, 0, 16,  9,  0, 14,  6, 0,
    0, 0,  3,  0,  4, 16,  1, 0,
    0, 0,  0, 10, 14, 16,  6, 0,
    0, 0,  3, 16, 16, 11,  2, 0,
    0, 0,  0,  9, 14,  0,  0, 0,
    0, 0,  2, 15,  6,  0,  0, 0,
};

int main(int argc, char **argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s MODEL.onnx [DEVICE]\n", argv[0]);
        return 2;
    }
    try {
        halcyon::check_abi();
        const halcyon::Backend backend(argc > 2 ? argv[2] : "auto");
        std::printf("%s\n", backend.report());

        const halcyon::Model model(backend, argv[1]);
        const halcyon::Port input = model.input(0);
        std::printf("input %s: %s\n", input.name(), input.description());

        // The model takes values from 0 to 1.
        std::vector<float> pixels = SEVEN;
        for (float &pixel : pixels) pixel /= 16;
        const auto image = halcyon::Tensor::of<float>({1, 1, 8, 8}, pixels);
        const std::vector<halcyon::Tensor> outputs = model.run({{"image", image}});

        const auto probabilities = outputs.at(0).data<float>();
        for (std::size_t digit = 0; digit < probabilities.size(); digit++) {
            std::printf("%zu  %6.2f %%\n", digit, 100.0 * static_cast<double>(probabilities[digit]));
        }
    } catch (const halcyon::Error &e) {
        std::fprintf(stderr, "%s: %s\n", halcyon_status_name(e.status()), e.what());
        return 1;
    }
    return 0;
}
