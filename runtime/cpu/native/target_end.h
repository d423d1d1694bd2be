// Ends what target_avx2.h or target_avx512.h began; GCC's holds to the end of the file.
#if defined(__clang__)
#pragma clang attribute pop
#endif
