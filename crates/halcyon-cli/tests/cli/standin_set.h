// Included before a stand-in's source. Applies the settings in the variable STANDIN_SET ("lose at launch=4")
// when the library is loaded, because a test cannot call functions in a process of the command.
#include <cstdint>
#include <cstdlib>
#include <string>

extern "C" int standin_set(const char* name, int64_t v);

__attribute__((constructor)) static void set_at_the_start() {
    const char* text = getenv("STANDIN_SET");
    if (!text) return;
    std::string s = text;
    size_t eq = s.find('=');
    if (eq != std::string::npos) standin_set(s.substr(0, eq).c_str(), atoll(s.c_str() + eq + 1));
}
