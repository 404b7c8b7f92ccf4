/* Language models: `language STORIES.gguf FOLDER_WITH_CHAT_TEMPLATE`. */

#include "check.h"

#include <stdbool.h>

/* What the model continues the prompt with, greedily (computed in float64). */
static const char *const PROMPT = "Once upon a time";
static const char *const STORY =
    ", there was a little girl named Lily. She loved to play outside in the park.";

struct Text {
    char text[4096];
    size_t length;
    size_t calls;
    /* End the generation after this number of calls; 0: never. */
    size_t most;
    /* Generate with this generator inside of the call. */
    const HalcyonGenerator *again;
};

static bool append(const char *text, size_t length, void *user) {
    struct Text *t = (struct Text *)user;
    CHECK(length > 0 && text[length] == '\0' && t->length + length < sizeof t->text);
    memcpy(t->text + t->length, text, length + 1);
    t->length += length;
    t->calls++;
    if (t->again != NULL) {
        struct Text inner = {0};
        FAILS(halcyon_generator_generate(t->again, PROMPT, NULL, append, &inner, NULL), HALCYON_STATUS_BUSY,
              "in use by another call");
    }
    return t->most == 0 || t->calls < t->most;
}

static HalcyonGenerateOptions greedy(size_t tokens) {
    HalcyonGenerateOptions o;
    OK(halcyon_generate_options_init(&o));
    CHECK(o.stop == NULL && o.stop_count == 0 && o.max_tokens == 0 && o.temperature > 0);
    o.temperature = 0;
    o.max_tokens = tokens;
    return o;
}

static void generates(const HalcyonGenerator *g) {
    HalcyonGenerateOptions o = greedy(24);
    HalcyonGenerated made = {0};
    /* The second time gives the same text: nothing is left of the first one. */
    for (int i = 0; i < 2; i++) {
        struct Text t = {0};
        OK(halcyon_generator_generate(g, PROMPT, &o, append, &t, &made));
        CHECK(strncmp(t.text, STORY, t.length) == 0 && t.length > 40);
        CHECK(made.tokens == 24 && made.prompt_tokens == 5 && made.finish == HALCYON_FINISH_LENGTH);
    }
    /* A stop text ends it, and is not part of the text. */
    const char *stop[2] = {"nothing", " Lily"};
    o.stop = stop;
    o.stop_count = 2;
    struct Text t = {0};
    OK(halcyon_generator_generate(g, PROMPT, &o, append, &t, &made));
    CHECK(strcmp(t.text, ", there was a little girl named") == 0 && made.finish == HALCYON_FINISH_STOP);
    /* The function ends it. */
    o.stop_count = 0;
    t = (struct Text){.most = 2};
    OK(halcyon_generator_generate(g, PROMPT, &o, append, &t, &made));
    CHECK(t.calls == 2 && made.finish == HALCYON_FINISH_CANCELLED && made.tokens < 24);
    /* Without a result, and with the generator used in the call. */
    t = (struct Text){.again = g, .most = 2};
    OK(halcyon_generator_generate(g, PROMPT, &o, append, &t, NULL));
    CHECK(t.calls == 2);
    /* Draws follow the seed. */
    struct Text drawn[3] = {{.length = 0}, {.length = 0}, {.length = 0}};
    o = greedy(24);
    o.temperature = 1;
    for (size_t i = 0; i < 3; i++) {
        o.seed = i / 2;
        OK(halcyon_generator_generate(g, PROMPT, &o, append, &drawn[i], NULL));
    }
    CHECK(strcmp(drawn[0].text, drawn[1].text) == 0 && strcmp(drawn[0].text, drawn[2].text) != 0);
}

static void wrong(const HalcyonBackend *backend, const HalcyonGenerator *g, const char *path) {
    struct Text t = {0};
    HalcyonGenerateOptions o = greedy(4);
    FAILS(halcyon_generate_options_init(NULL), HALCYON_STATUS_ARGUMENT, "`options` is NULL");
    FAILS(halcyon_generator_generate(NULL, PROMPT, &o, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`generator` is NULL");
    FAILS(halcyon_generator_generate(g, NULL, &o, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`prompt` is NULL");
    FAILS(halcyon_generator_generate(g, PROMPT, &o, NULL, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`on_text` is NULL");
    o.temperature = -1;
    FAILS(halcyon_generator_generate(g, PROMPT, &o, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "temperature");
    o = greedy(4);
    o.stop_count = 1;
    FAILS(halcyon_generator_generate(g, PROMPT, &o, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`options->stop` is NULL");
    const char *none = NULL;
    o.stop = &none;
    FAILS(halcyon_generator_generate(g, PROMPT, &o, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`options->stop[0]` is NULL");
    CHECK(t.calls == 0);

    /* This model was made without a chat template. */
    HalcyonMessage message = {"user", "Hello"};
    FAILS(halcyon_generator_chat(g, &message, 1, NULL, append, &t, NULL), HALCYON_STATUS_UNSUPPORTED,
          "chat template");
    message.content = NULL;
    FAILS(halcyon_generator_chat(g, &message, 1, NULL, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`messages[0].content` is NULL");
    FAILS(halcyon_generator_chat(g, NULL, 1, NULL, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`messages` is NULL");
    FAILS(halcyon_generator_chat(g, NULL, 0, NULL, append, &t, NULL), HALCYON_STATUS_ARGUMENT,
          "`messages` is empty");

    HalcyonGenerator *out = NULL;
    FAILS(halcyon_generator_open(backend, "nowhere.gguf", 0, &out), HALCYON_STATUS_IO, "nowhere.gguf");
    CHECK(out == NULL);
    FAILS(halcyon_generator_open(NULL, path, 0, &out), HALCYON_STATUS_ARGUMENT, "`backend` is NULL");
    FAILS(halcyon_generator_open(backend, NULL, 0, &out), HALCYON_STATUS_ARGUMENT, "`path` is NULL");
    FAILS(halcyon_generator_open(backend, path, 0, NULL), HALCYON_STATUS_ARGUMENT, "`out` is NULL");
    halcyon_generator_free(NULL);
}

/* The template writes a line for each message, so a chat is the same as a text with these lines. */
static void chats(const HalcyonBackend *backend, const char *path) {
    HalcyonGenerator *g = NULL;
    OK(halcyon_generator_open(backend, path, 0, &g));
    const HalcyonMessage messages[2] = {{"system", "Tell"}, {"user", "Once upon"}};
    const HalcyonGenerateOptions o = greedy(6);
    struct Text chat = {0}, text = {0};
    HalcyonGenerated made[2];
    OK(halcyon_generator_chat(g, messages, 2, &o, append, &chat, &made[0]));
    OK(halcyon_generator_generate(g, "system: Tell\nuser: Once upon\n", &o, append, &text, &made[1]));
    CHECK(chat.length > 0 && strcmp(chat.text, text.text) == 0 &&
          made[0].prompt_tokens == made[1].prompt_tokens);
    halcyon_generator_free(g);
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    HalcyonBackend *backend = NULL;
    HalcyonGenerator *g = NULL;
    OK(halcyon_backend_open("cpu", NULL, &backend));
    OK(halcyon_generator_open(backend, argv[1], 256, &g));
    generates(g);
    wrong(backend, g, argv[1]);
    chats(backend, argv[2]);
    /* A context beyond the model's is the model's. */
    HalcyonGenerator *large = NULL;
    OK(halcyon_generator_open(backend, argv[1], SIZE_MAX, &large));
    halcyon_generator_free(large);
    /* A prompt that is longer than the context. */
    static char endless[20000];
    for (size_t i = 0; i + 1 < sizeof endless; i++) endless[i] = i % 5 == 4 ? ' ' : 'a';
    struct Text t = {0};
    FAILS(halcyon_generator_generate(g, endless, NULL, append, &t, NULL), HALCYON_STATUS_ARGUMENT, "256");
    /* Without a limit, the text goes on until the context is full. */
    HalcyonGenerateOptions o = greedy(0);
    HalcyonGenerated made = {0};
    OK(halcyon_generator_generate(g, PROMPT, &o, append, &t, &made));
    CHECK(made.finish == HALCYON_FINISH_LENGTH ? made.prompt_tokens + made.tokens >= 256 : made.tokens > 64);
    /* A generator outlives its backend. */
    halcyon_backend_free(backend);
    generates(g);
    halcyon_generator_free(g);
    puts("done");
    return 0;
}
