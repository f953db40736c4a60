// Decode a region of a JPEG at a reduced DCT scale, and add restart markers without changing a pixel.
//
// Compiled on first use by data/images/decode.py, and linked to the libjpeg-turbo in Pillow's wheel. Most machines do
// not have its headers, so the parts used of the public structs of its 6.2 interface (frozen since 1998) are declared
// here. The library compares the structs' sizes with its own, and rejects a mismatch.

#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

extern "C" {

struct ErrorManager {
    void (*error_exit)(void*);
    void (*emit_message)(void*, int);
    void (*other[3])(void*);
    int code;
    union { int i[8]; char s[80]; } parameter;
    int trace_level;
    long warnings;
    void* rest[4];
};

struct Common {  // the first fields of both structs
    ErrorManager* err;
    void *mem, *progress, *client;
    int is_decompressor, state;
};

struct Decompress : Common {
    void* src;
    unsigned width, height;
    int components, jpeg_space, out_space;
    unsigned scale_num, scale_denom;
    double gamma;
    int buffered, raw, dct_method, fancy_upsampling, smoothing, quantize[7];
    unsigned out_width, out_height;
    int out_components[2], rec_outbuf_height, colors;
    void* colormap;
    unsigned out_scanline;
    int input_scan;
    char rest[632 - 176];
};

struct Compress : Common {
    void* dest;
    unsigned width, height;
    int components, in_space;
    double gamma;
    int precision, jpeg_components, jpeg_space;
    void* tables[13];
    uint8_t arithmetic[48];
    int scans;
    void* scan_info;
    int raw, arithmetic_coding, optimize, ccir601, smoothing, dct_method;
    unsigned restart_interval;
    int restart_in_rows;
    char rest[520 - 288];
};

static_assert(sizeof(ErrorManager) == 168 && sizeof(Decompress) == 632 && sizeof(Compress) == 520, "not LP64");

ErrorManager* jpeg_std_error(ErrorManager*);
void jpeg_CreateDecompress(Decompress*, int version, size_t size);
void jpeg_CreateCompress(Compress*, int version, size_t size);
void jpeg_mem_src(Decompress*, const unsigned char*, unsigned long);
void jpeg_mem_dest(Compress*, unsigned char**, unsigned long*);
int jpeg_read_header(Decompress*, int require_image);
int jpeg_start_decompress(Decompress*);
unsigned jpeg_read_scanlines(Decompress*, unsigned char** rows, unsigned count);
unsigned jpeg_skip_scanlines(Decompress*, unsigned count);
void jpeg_crop_scanline(Decompress*, unsigned* x, unsigned* width);
void jpeg_destroy_decompress(Decompress*);
void jpeg_destroy_compress(Compress*);
void** jpeg_read_coefficients(Decompress*);
void jpeg_copy_critical_parameters(Decompress*, Compress*);
void jpeg_write_coefficients(Compress*, void**);
void jpeg_finish_compress(Compress*);
}

namespace {

constexpr int kVersion = 62, kRgb = 2;
constexpr unsigned kMargin = 4;  // pixels around the region, so that chroma upsampling sees the same neighbours
constexpr unsigned kCutMargin = 1;  // the same margin for blocks cut out of the bytes, whose position is exact
constexpr uint64_t kMaxPixels = 100000000;  // as MAX_PIXELS in data/images/decode.py

struct Jump : ErrorManager {
    jmp_buf back;
};

void leave(void* any) { longjmp(static_cast<Jump*>(static_cast<Common*>(any)->err)->back, 1); }

void read_header(Decompress& image) {
    jpeg_read_header(&image, 1);
    if (uint64_t(image.width) * image.height > kMaxPixels) leave(&image);
}

void stay_quiet(void* any, int level) {
    if (level < 0) static_cast<Common*>(any)->err->warnings++;
}

void prepare(Jump& jump) {
    memset(static_cast<void*>(&jump), 0, sizeof jump);
    jpeg_std_error(&jump);
    jump.error_exit = leave;
    jump.emit_message = stay_quiet;
}

// Offsets of the frame's sides and of the scan's start, and the grouping of the scan's blocks.
struct Layout {
    size_t sides_at = 0, scan_at = 0;
    unsigned height = 0, width = 0, mcu_height = 0, mcu_width = 0, mcus_per_row = 0, interval = 0;
    bool sequential = false;
};

Layout read_layout(const uint8_t* data, size_t size) {
    Layout found;
    unsigned components = 0;
    for (size_t at = 2; at + 9 < size && data[at] == 0xFF;) {
        const unsigned marker = data[at + 1], length = data[at + 2] << 8 | data[at + 3];
        if (marker == 0xFF) { at++; continue; }
        if (at + 2 + length > size) break;
        if (marker == 0xDD) found.interval = data[at + 4] << 8 | data[at + 5];
        if (marker >= 0xC0 && marker <= 0xC2) {
            components = data[at + 9];
            if (length < 8 + 3 * components) break;
            unsigned h = 1, v = 1;
            for (unsigned c = 0; components > 1 && c < components; c++) {
                const unsigned factors = data[at + 11 + 3 * c];
                h = factors >> 4 > h ? factors >> 4 : h;
                v = (factors & 15) > v ? factors & 15 : v;
            }
            found.sides_at = at + 5;
            found.height = data[at + 5] << 8 | data[at + 6];
            found.width = data[at + 7] << 8 | data[at + 8];
            found.mcu_height = 8 * v;
            found.mcu_width = 8 * h;
            found.mcus_per_row = (found.width + 8 * h - 1) / (8 * h);
            found.sequential = marker != 0xC2;
        }
        if (marker == 0xDA) {
            found.sequential &= data[at + 4] == components;  // otherwise each component has a separate scan
            found.scan_at = at + 2 + length;
            break;
        }
        at += 2 + length;
    }
    return found;
}

// A short run of blocks whose length divides a row of blocks, so that no run between restart markers spans two rows.
unsigned choose_interval(unsigned mcus_per_row) {
    for (unsigned run : {2, 3, 5})
        if (mcus_per_row % run == 0) return run;
    return 1;
}

// If restart markers divide the rows of a JPEG, cut the unneeded runs out of its bytes, so that not even their Huffman
// codes are read. `cut` then holds a complete, smaller JPEG, and x and y are shifted; otherwise nothing changes.
void cut_region(const uint8_t* data, size_t size, unsigned& x, unsigned& y, unsigned w, unsigned h, unsigned margin,
                std::vector<uint8_t>& cut) {
    const Layout layout = read_layout(data, size);
    if (!layout.scan_at || !layout.sequential || !layout.interval || layout.mcus_per_row % layout.interval) return;
    // The grid of runs (the blocks between two markers): `per_row` in each of `rows` rows, each `run` pixels wide.
    const unsigned per_row = layout.mcus_per_row / layout.interval, run = layout.interval * layout.mcu_width;
    const auto from = [margin](unsigned at, unsigned unit) { return at > margin ? (at - margin) / unit : 0; };
    const auto to = [margin](unsigned end, unsigned unit, unsigned all) {
        const unsigned found = (end + margin + unit - 1) / unit;
        return found < all ? found : all;
    };
    const unsigned rows = (layout.height + layout.mcu_height - 1) / layout.mcu_height;
    // The runs to keep: rows first … last − 1, columns left … right − 1.
    const unsigned first = from(y, layout.mcu_height), last = to(y + h, layout.mcu_height, rows);
    unsigned left = from(x, run), right = to(x + w, run, per_row);
    if (right == left + 1 && per_row > 1) left ? left-- : right++;  // libjpeg upsamples two chroma columns differently
    if (first >= last || left >= right) return;  // the region is outside the image: two headers disagree
    if (last - first == rows && right - left == per_row) return;
    // Find the markers. 0xFF is followed by 0x00 if it is data, by 0xD0 … 0xD7 in a restart marker, by 0xD9 at the end.
    std::vector<size_t> starts{layout.scan_at};  // of the bytes between markers
    starts.reserve(last * per_row + 1);
    for (size_t at = layout.scan_at; starts.size() <= last * per_row;) {
        const void* found = at + 1 < size ? memchr(data + at, 0xFF, size - at - 1) : nullptr;
        if (!found) return;
        const auto* mark = static_cast<const uint8_t*>(found);
        at = mark - data + (mark[1] == 0xFF ? 1 : 2);
        if (mark[1] >= 0xD0 && mark[1] <= 0xD9) starts.push_back(at);
        if (mark[1] == 0xD9 && starts.size() <= last * per_row) return;
    }
    // Write the headers with the new sides, then the kept runs, with renumbered markers.
    const unsigned end = last == rows ? layout.height : last * layout.mcu_height;
    const unsigned kept_h = end - first * layout.mcu_height;
    const unsigned kept_w = right == per_row ? layout.width - left * run : (right - left) * run;
    cut.reserve(layout.scan_at + starts[last * per_row] - starts[first * per_row] + 2);
    cut.assign(data, data + layout.scan_at);
    const uint8_t sides[] = {uint8_t(kept_h >> 8), uint8_t(kept_h), uint8_t(kept_w >> 8), uint8_t(kept_w)};
    memcpy(cut.data() + layout.sides_at, sides, 4);
    unsigned count = 0;
    for (unsigned row = first; row < last; row++)
        for (unsigned column = left; column < right; column++) {
            const unsigned number = row * per_row + column;
            cut.insert(cut.end(), data + starts[number], data + starts[number + 1]);
            cut.back() = 0xD0 + count++ % 8;  // markers are numbered cyclically from 0 to 7
        }
    cut.back() = 0xD9;
    x -= left * run;
    y -= first * layout.mcu_height;
}

}  // namespace

extern "C" {

// Write rows y … y+h−1, columns x … x+w−1 of the image at 1/denom scale as RGB; return 0, or 1 if it is not decodable.
int decode_region(const uint8_t* data, size_t size, unsigned denom, unsigned x, unsigned y, unsigned w, unsigned h,
                  uint8_t* out) {
    thread_local std::vector<uint8_t> line(3 * 65536 + 64);  // the widest that JPEG allows
    std::vector<uint8_t> cut;
    unsigned full_x = x * denom, full_y = y * denom;
    cut_region(data, size, full_x, full_y, w * denom, h * denom, kCutMargin * denom, cut);
    x = full_x / denom;
    y = full_y / denom;
    Decompress image;
    Jump jump;
    prepare(jump);
    memset(static_cast<void*>(&image), 0, sizeof image);
    image.err = &jump;
    if (setjmp(jump.back)) {
        jpeg_destroy_decompress(&image);
        return 1;
    }
    jpeg_CreateDecompress(&image, kVersion, sizeof image);
    jpeg_mem_src(&image, cut.empty() ? data : cut.data(), cut.empty() ? size : cut.size());
    read_header(image);
    image.out_space = kRgb;
    image.scale_num = 1;
    image.scale_denom = denom;
    jpeg_start_decompress(&image);
    if (x + w > image.out_width || y + h > image.out_height) leave(&image);
    unsigned left = x > kMargin ? x - kMargin : 0, width = x + w + kMargin - left;
    if (left + width > image.out_width) width = image.out_width - left;
    if (width < image.out_width) jpeg_crop_scanline(&image, &left, &width);
    // If a line starts at a multiple of 32, libjpeg-turbo bypasses the cache, and the copy would wait for memory.
    uint8_t* pixels = line.data() + (-reinterpret_cast<uintptr_t>(line.data()) & 31) + 16;
    if (y) jpeg_skip_scanlines(&image, y);
    for (unsigned row = 0; row < h; row++) {
        jpeg_read_scanlines(&image, &pixels, 1);
        memcpy(out + 3 * size_t(w) * row, pixels + 3 * (x - left), 3 * size_t(w));
    }
    jpeg_destroy_decompress(&image);
    return 0;
}

// Write the same coefficients with restart markers that divide the rows; `*out` is allocated by malloc. Return 0, or 1
// if the image cannot be read completely.
int add_restarts(const uint8_t* data, size_t size, uint8_t** out, unsigned long* out_size) {
    Decompress image;
    Compress copy;
    Jump jump;
    prepare(jump);
    memset(static_cast<void*>(&image), 0, sizeof image);
    memset(static_cast<void*>(&copy), 0, sizeof copy);
    image.err = copy.err = &jump;
    *out = nullptr;
    volatile int failed = 1;
    if (!setjmp(jump.back)) {
        jpeg_CreateDecompress(&image, kVersion, sizeof image);
        jpeg_CreateCompress(&copy, kVersion, sizeof copy);
        jpeg_mem_src(&image, data, size);
        read_header(image);
        void** coefficients = jpeg_read_coefficients(&image);
        const bool damaged = jump.warnings != 0;  // writing resets the count
        jpeg_copy_critical_parameters(&image, &copy);
        copy.restart_interval = choose_interval(read_layout(data, size).mcus_per_row);
        copy.optimize = 1;
        jpeg_mem_dest(&copy, out, out_size);
        jpeg_write_coefficients(&copy, coefficients);
        jpeg_finish_compress(&copy);
        failed = damaged;
    }
    jpeg_destroy_compress(&copy);
    jpeg_destroy_decompress(&image);
    return failed;
}

void release(void* memory) { free(memory); }
}
