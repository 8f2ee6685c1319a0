/* Calls functions of a library, as described on standard input, for arm.py. Run by an emulator of another processor.

   Every region of memory ends where a page ends that must not be touched, so no kernel reads or writes beyond it. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define PAGE 65536 /* the largest of any ARM system */
#define REGIONS 4096

typedef struct { char *start; uint64_t size; void *pages; uint64_t mapped; } Region;
typedef uint64_t Word;
typedef int Function(Word, Word, Word, Word, Word, Word, Word, Word, Word, Word);

static void read_all(void *to, uint64_t size) {
    if (size && fread(to, size, 1, stdin) != 1) exit(0); /* the end of the input */
}

static Word read_word(void) {
    Word word;
    read_all(&word, sizeof word);
    return word;
}

static Region read_region(void) {
    Region region = {.size = read_word()};
    region.mapped = (region.size + PAGE - 1) / PAGE * PAGE + PAGE;
    region.pages = mmap(NULL, region.mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (region.pages == MAP_FAILED || mprotect((char *)region.pages + region.mapped - PAGE, PAGE, PROT_NONE)) exit(2);
    region.start = (char *)region.pages + region.mapped - PAGE - region.size;
    read_all(region.start, region.size);
    return region;
}

int main(int count, char **words) {
    void *library = count > 1 ? dlopen(words[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
    static Region regions[REGIONS];
    for (;;) {
        char name[64] = {0};
        Word arguments[10] = {0}, length = read_word();
        if (length >= sizeof name) return 2;
        read_all(name, length);
        Word number = read_word();
        if (number > REGIONS) return 2;
        for (Word i = 0; i < number; i++) regions[i] = read_region();
        for (Word left = read_word(); left; left--) { /* a pointer in one region to a place in another */
            Word in = read_word(), at = read_word(), target = read_word(), offset = read_word();
            *(char **)(regions[in].start + at) = regions[target].start + offset;
        }
        Word used = read_word();
        for (Word i = 0; i < used && i < 10; i++) {
            Word region = read_word(), value = read_word(); /* region + 1 of a pointer; 0: a number */
            arguments[i] = region ? (Word)regions[region - 1].start + value : value;
        }
        Function *function = (Function *)dlsym(library, name);
        if (!function) return fprintf(stderr, "%s\n", dlerror()), 2;
        Word *a = arguments;
        int64_t result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
        fwrite(&result, sizeof result, 1, stdout);
        for (Word i = 0; i < number; i++) {
            if (regions[i].size) fwrite(regions[i].start, regions[i].size, 1, stdout);
            munmap(regions[i].pages, regions[i].mapped);
        }
        fflush(stdout);
    }
}
