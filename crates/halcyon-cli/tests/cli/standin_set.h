// Included before a stand-in's source: STANDIN_SET ("lose at launch=4") is set when the library is loaded, in
// a process that has no other way to tell it.
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
