// Split-K flash decoding over packed pages. Python side and theory of operation: kernels.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
namespace kvd {
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

// ---- instructions ----------------------------------------------------------------------------------------------
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void close_batch() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ __forceinline__ void wait_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transposed(u32 a) {
  u32 d; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a)); return d;
}
__device__ __forceinline__ float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
__device__ __forceinline__ u32 half_pair(float a, float b) { __half2 h = __floats2half2_rn(a, b); return *(u32*)&h; }
__device__ __forceinline__ float bf16_low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float bf16_high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ float warp_max(float x) { for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(~0u, x, o)); return x; }
__device__ __forceinline__ float warp_sum(float x) { for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(~0u, x, o); return x; }

// ---- codes as numbers --------------------------------------------------------------------------------------------
// The bits of a code, left where they are in a half, are a denormal half: exactly code * 2^POS * 2^-24. So two codes
// become two factors of a product by one AND; the power of two goes into the other factor (queries) or the result.
template <int BITS, int J> struct Code {
  static constexpr int PER_BYTE = 8 / BITS;
  static constexpr int POS = (J % PER_BYTE) * BITS;
  static constexpr u32 MASK = (BITS == 8 ? 0x00FF00FFu : BITS == 4 ? 0x000F000Fu : 0x00030003u) << POS;
  __device__ static __forceinline__ u32 of(u32 w, u32 w8) { return (J >= PER_BYTE ? w8 : w) & MASK; }
};
// Of the 16 dims of a group that a lane holds, pair P = 0..7 takes dims low and low + GAP; POS as above.
template <int BITS> struct Pairs {
  static constexpr int GAP = BITS == 8 ? 2 : BITS == 4 ? 4 : 8;
  __host__ __device__ static constexpr int low(int p) { return BITS == 8 ? (p >> 1) * 4 + (p & 1) : BITS == 4 ? (p >> 2) * 8 + (p & 3) : p; }
  __host__ __device__ static constexpr int pos(int p) { return BITS == 8 ? 0 : BITS == 4 ? (p & 1) * 4 : (p & 3) * 2; }
};
template <int G> __device__ __forceinline__ void row_of(float (&o)[G], const u16* p, int r) {
  if constexpr (G % 2 == 0) {
    const u32* q = (const u32*)p + r * (G / 2);
#pragma unroll
    for (int i = 0; i < G / 2; i++) { u32 w = q[i]; o[2 * i] = bf16_low(w); o[2 * i + 1] = bf16_high(w); }
  } else {
#pragma unroll
    for (int i = 0; i < G; i++) o[i] = bf16_low((u32)p[r * G + i]);
  }
}
// One 64-wide group of a key row times the queries: codes only.
template <int BITS> __device__ __forceinline__ void score_codes(float (&c)[4], const u32* kc, int r0, int r1, int row_words, int gr, int t, const u32* q) {
  if constexpr (BITS == 4) {
    const uint2 x = *(const uint2*)(kc + r0 * row_words + gr * 8 + t * 2), y = *(const uint2*)(kc + r1 * row_words + gr * 8 + t * 2);
    u32 x8 = x.x >> 8, y8 = y.x >> 8;
    mma(c, Code<4,0>::of(x.x,x8), Code<4,0>::of(y.x,y8), Code<4,1>::of(x.x,x8), Code<4,1>::of(y.x,y8), q[0], q[1]);
    mma(c, Code<4,2>::of(x.x,x8), Code<4,2>::of(y.x,y8), Code<4,3>::of(x.x,x8), Code<4,3>::of(y.x,y8), q[2], q[3]);
    x8 = x.y >> 8; y8 = y.y >> 8;
    mma(c, Code<4,0>::of(x.y,x8), Code<4,0>::of(y.y,y8), Code<4,1>::of(x.y,x8), Code<4,1>::of(y.y,y8), q[4], q[5]);
    mma(c, Code<4,2>::of(x.y,x8), Code<4,2>::of(y.y,y8), Code<4,3>::of(x.y,x8), Code<4,3>::of(y.y,y8), q[6], q[7]);
  } else if constexpr (BITS == 2) {
    const u32 x = kc[r0 * row_words + gr * 4 + t], y = kc[r1 * row_words + gr * 4 + t], x8 = x >> 8, y8 = y >> 8;
    mma(c, Code<2,0>::of(x,x8), Code<2,0>::of(y,y8), Code<2,1>::of(x,x8), Code<2,1>::of(y,y8), q[0], q[1]);
    mma(c, Code<2,2>::of(x,x8), Code<2,2>::of(y,y8), Code<2,3>::of(x,x8), Code<2,3>::of(y,y8), q[2], q[3]);
    mma(c, Code<2,4>::of(x,x8), Code<2,4>::of(y,y8), Code<2,5>::of(x,x8), Code<2,5>::of(y,y8), q[4], q[5]);
    mma(c, Code<2,6>::of(x,x8), Code<2,6>::of(y,y8), Code<2,7>::of(x,x8), Code<2,7>::of(y,y8), q[6], q[7]);
  } else {
    const uint4 xs = *(const uint4*)(kc + r0 * row_words + gr * 16 + t * 4), ys = *(const uint4*)(kc + r1 * row_words + gr * 16 + t * 4);
    const u32 x[4] = {xs.x, xs.y, xs.z, xs.w}, y[4] = {ys.x, ys.y, ys.z, ys.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 x8 = x[i] >> 8, y8 = y[i] >> 8;
      mma(c, Code<8,0>::of(x[i],x8), Code<8,0>::of(y[i],y8), Code<8,1>::of(x[i],x8), Code<8,1>::of(y[i],y8), q[2 * i], q[2 * i + 1]);
    }
  }
}
// One 64-wide group of 16 value rows (transposed) times the weights; acc[i]: dims g*8+i (and +4) of the group.
template <int BITS> __device__ __forceinline__ void add_codes(float (*acc)[4], const u32* vc, int ta, int row_words, int gr, int g, u32 f0, u32 f1) {
  if constexpr (BITS == 4) {
    const u32* v = vc + ta * row_words + gr * 8 + g;
    const u32 w0 = v[0], w1 = v[row_words], w2 = v[8 * row_words], w3 = v[9 * row_words];
    const u32 al = __byte_perm(w0, w1, 0x5410), ah = __byte_perm(w0, w1, 0x7632), bl = __byte_perm(w2, w3, 0x5410), bh = __byte_perm(w2, w3, 0x7632);
    const u32 al8 = al >> 8, ah8 = ah >> 8, bl8 = bl >> 8, bh8 = bh >> 8;
    mma(acc[0], Code<4,0>::of(al,al8), Code<4,0>::of(ah,ah8), Code<4,0>::of(bl,bl8), Code<4,0>::of(bh,bh8), f0, f1);
    mma(acc[1], Code<4,1>::of(al,al8), Code<4,1>::of(ah,ah8), Code<4,1>::of(bl,bl8), Code<4,1>::of(bh,bh8), f0, f1);
    mma(acc[2], Code<4,2>::of(al,al8), Code<4,2>::of(ah,ah8), Code<4,2>::of(bl,bl8), Code<4,2>::of(bh,bh8), f0, f1);
    mma(acc[3], Code<4,3>::of(al,al8), Code<4,3>::of(ah,ah8), Code<4,3>::of(bl,bl8), Code<4,3>::of(bh,bh8), f0, f1);
  } else if constexpr (BITS == 2) {
    const u16* v = (const u16*)(vc + ta * row_words + gr * 4) + g;
    const u32 a = (u32)v[0] | ((u32)v[2 * row_words] << 16), b = (u32)v[16 * row_words] | ((u32)v[18 * row_words] << 16);
    const u32 a8 = a >> 8, b8 = b >> 8;
    mma(acc[0], Code<2,0>::of(a,a8), Code<2,4>::of(a,a8), Code<2,0>::of(b,b8), Code<2,4>::of(b,b8), f0, f1);
    mma(acc[1], Code<2,1>::of(a,a8), Code<2,5>::of(a,a8), Code<2,1>::of(b,b8), Code<2,5>::of(b,b8), f0, f1);
    mma(acc[2], Code<2,2>::of(a,a8), Code<2,6>::of(a,a8), Code<2,2>::of(b,b8), Code<2,6>::of(b,b8), f0, f1);
    mma(acc[3], Code<2,3>::of(a,a8), Code<2,7>::of(a,a8), Code<2,3>::of(b,b8), Code<2,7>::of(b,b8), f0, f1);
  } else {
    const u32* v = vc + ta * row_words + gr * 16 + g * 2;
    const uint2 w0 = *(const uint2*)v, w1 = *(const uint2*)(v + row_words), w2 = *(const uint2*)(v + 8 * row_words), w3 = *(const uint2*)(v + 9 * row_words);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 pick = half ? 0x7632 : 0x5410;
      const u32 a = __byte_perm(w0.x, w1.x, pick), c = __byte_perm(w0.y, w1.y, pick), b = __byte_perm(w2.x, w3.x, pick), d = __byte_perm(w2.y, w3.y, pick);
      const u32 a8 = a >> 8, b8 = b >> 8, c8 = c >> 8, d8 = d >> 8;
      mma(acc[2 * half], Code<8,0>::of(a,a8), Code<8,0>::of(c,c8), Code<8,0>::of(b,b8), Code<8,0>::of(d,d8), f0, f1);
      mma(acc[2 * half + 1], Code<8,1>::of(a,a8), Code<8,1>::of(c,c8), Code<8,1>::of(b,b8), Code<8,1>::of(d,d8), f0, f1);
    }
  }
}

// ---- one split of one KV head of one row -------------------------------------------------------------------------
// frames: addresses of the row's pages; places: byte offsets in a frame of the layer's six tensors; tokens [begin, end).
struct Stream { const u64* frames; const long long* places; int begin, end; };

// Warps take tiles of T tokens in turn, each through a shared-memory ring of its own. Results: pacc [NREP][VD] and
// pml [NREP][2] (maximum in base 2 and sum), strides of `hstride` splits between heads.
template <typename Q, int KBITS, int VBITS, int KD, int VD, int NREP, int WARPS, int STAGES, int T>
__device__ __forceinline__ void attend(const Q* __restrict__ q, const Stream& S, int head, int tile0, int tile1,
    float qscale, char* smem, float* pacc, float* pml, int hstride) {
  constexpr int KG = KD / 64, VG = VD / 64, MT = T / 16;
  constexpr int KCB = T * KD * KBITS / 8, KSB = T * KG * 2, VCB = T * VD * VBITS / 8, VSB = T * VG * 2;
  constexpr int SB = KCB + 2 * KSB + VCB + 2 * VSB;
  constexpr int KW = KD * KBITS / 32, VW = VD * VBITS / 32;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  char* ring = smem + warp * (STAGES * SB);
  const u32 ring_u = (u32)__cvta_generic_to_shared(ring);
  const int n = tile1 - tile0 > warp ? (tile1 - tile0 - warp + WARPS - 1) / WARPS : 0;
  const long long pkc = S.places[0], pks = S.places[1], pkb = S.places[2], pvc = S.places[3], pvs = S.places[4], pvb = S.places[5];
  auto issue = [&](int i, int st) {
    if (i < n) {
      const int token = (tile0 + warp + i * WARPS) * T;
      const char* frame = (const char*)__ldg(S.frames + token / 256);
      const long long row = (long long)head * 256 + token % 256;
      const u32 d = ring_u + st * SB;
      auto copy = [&](u32 to, const char* from, int bytes) {
#pragma unroll 8
        for (int o = lane * 16; o < bytes; o += 512) copy16(to + o, from + o);
      };
      copy(d, frame + pkc + row * (KW * 4), KCB);
      copy(d + KCB + 2 * KSB, frame + pvc + row * (VW * 4), VCB);
      constexpr int NK = KSB / 16, NV = VSB / 16;  // scales and biases: spread over the lanes
      for (int c = lane; c < 2 * NK + 2 * NV; c += 32) {
        const bool key = c < 2 * NK;
        const int e = key ? c : c - 2 * NK, half = key ? NK : NV;
        const long long place = key ? (e < half ? pks : pkb) : (e < half ? pvs : pvb);
        const int o = (e < half ? e : e - half) * 16;
        copy16((key ? d + KCB : d + KCB + 2 * KSB + VCB) + e * 16, frame + place + row * ((key ? KG : VG) * 2) + o);
      }
    }
    close_batch();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) issue(i, i);

  // Queries as halves, made at most 1 in size per head by a power of two that the exponent takes back.
  u32 qf[KG * 8];
  float QS[KG][2], back[2];
  {
    const Q* mine = q + (g < NREP ? g : 0) * KD;
    float top = 0;
#pragma unroll
    for (int gr = 0; gr < KG; gr++)
#pragma unroll
      for (int i = 0; i < 16; i++) top = fmaxf(top, fabsf((float)mine[gr * 64 + t * 16 + i]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1)); top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const int power = top > 0.f && g < NREP ? ilogbf(top) + 1 : 0;
    const float shrink = g < NREP ? exp2f((float)-power) : 0.f;
#pragma unroll
    for (int e = 0; e < 2; e++) back[e] = exp2f((float)__shfl_sync(~0u, power, (2 * t + e) * 4)) * 262144.f * qscale;
#pragma unroll
    for (int gr = 0; gr < KG; gr++) {
      float sum = 0;
#pragma unroll
      for (int p = 0; p < 8; p++) {
        const int low = Pairs<KBITS>::low(p);
        const float f = (float)(64 >> Pairs<KBITS>::pos(p));
        const u32 h = half_pair((float)mine[gr * 64 + t * 16 + low] * shrink * f, (float)mine[gr * 64 + t * 16 + low + Pairs<KBITS>::GAP] * shrink * f);
        qf[gr * 8 + p] = h;
        const __half2 hh = *(const __half2*)&h;
        sum += (__low2float(hh) + __high2float(hh)) * (1.f / f);
      }
      sum += __shfl_xor_sync(~0u, sum, 1); sum += __shfl_xor_sync(~0u, sum, 2);
#pragma unroll
      for (int e = 0; e < 2; e++) QS[gr][e] = __shfl_sync(~0u, sum, (2 * t + e) * 4) * (1.f / 262144.f);
    }
  }
  float acc[VG * 4][4];
#pragma unroll
  for (int i = 0; i < VG * 4; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.f;
  float m0 = -1e24f, m1 = -1e24f, l0 = 0, l1 = 0, BS[VG][2];
#pragma unroll
  for (int i = 0; i < VG; i++) BS[i][0] = BS[i][1] = 0.f;

  int st = 0;
  for (int it = 0; it < n; it++) {
    wait_but<STAGES - 1>(); __syncwarp();
    const char* sp = ring + st * SB;
    const u32* kc = (const u32*)sp;
    const u16* ks = (const u16*)(sp + KCB);
    const u16* kb = (const u16*)(sp + KCB + KSB);
    const u32* vc = (const u32*)(sp + KCB + 2 * KSB);
    const u16* vs = (const u16*)(sp + KCB + 2 * KSB + VCB);
    const u16* vb = (const u16*)(sp + KCB + 2 * KSB + VCB + VSB);
    const int first = (tile0 + warp + it * WARPS) * T, skip = S.begin - first, left = S.end - first;
    const bool edge = skip > 0 || left < T;
    float sc[MT][4];
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      const int r0 = mt * 16 + g, r1 = r0 + 8;
      float s0[KG], s1[KG], b0[KG], b1[KG];
      row_of<KG>(s0, ks, r0); row_of<KG>(s1, ks, r1); row_of<KG>(b0, kb, r0); row_of<KG>(b1, kb, r1);
      sc[mt][0] = sc[mt][1] = sc[mt][2] = sc[mt][3] = 0.f;
#pragma unroll
      for (int gr = 0; gr < KG; gr++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
        score_codes<KBITS>(c, kc, r0, r1, KW, gr, t, qf + gr * 8);
        sc[mt][0] += s0[gr] * c[0] + b0[gr] * QS[gr][0];
        sc[mt][1] += s0[gr] * c[1] + b0[gr] * QS[gr][1];
        sc[mt][2] += s1[gr] * c[2] + b1[gr] * QS[gr][0];
        sc[mt][3] += s1[gr] * c[3] + b1[gr] * QS[gr][1];
      }
      if (edge) {
        if (r0 < skip || r0 >= left) sc[mt][0] = sc[mt][1] = -INFINITY;
        if (r1 < skip || r1 >= left) sc[mt][2] = sc[mt][3] = -INFINITY;
      }
    }
    float x0 = m0, x1 = m1;
#pragma unroll
    for (int mt = 0; mt < MT; mt++) { x0 = fmaxf(x0, fmaxf(sc[mt][0], sc[mt][2])); x1 = fmaxf(x1, fmaxf(sc[mt][1], sc[mt][3])); }
    if (__any_sync(~0u, (x0 > m0) || (x1 > m1))) {
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) { x0 = fmaxf(x0, __shfl_xor_sync(~0u, x0, o)); x1 = fmaxf(x1, __shfl_xor_sync(~0u, x1, o)); }
      const float a0 = exp2_fast((m0 - x0) * back[0]), a1 = exp2_fast((m1 - x1) * back[1]);
      m0 = x0; m1 = x1; l0 *= a0; l1 *= a1;
#pragma unroll
      for (int i = 0; i < VG * 4; i++) { acc[i][0] *= a0; acc[i][1] *= a1; acc[i][2] *= a0; acc[i][3] *= a1; }
#pragma unroll
      for (int i = 0; i < VG; i++) { BS[i][0] *= a0; BS[i][1] *= a1; }
    }
#pragma unroll
    for (int mt = 0; mt < MT; mt++) {
      const int r0 = mt * 16 + g, r1 = r0 + 8;
      const float n0 = -m0 * back[0], n1 = -m1 * back[1];
      const float p0 = exp2_fast(fmaf(sc[mt][0], back[0], n0)), p1 = exp2_fast(fmaf(sc[mt][1], back[1], n1));
      const float p2 = exp2_fast(fmaf(sc[mt][2], back[0], n0)), p3 = exp2_fast(fmaf(sc[mt][3], back[1], n1));
      l0 += p0 + p2; l1 += p1 + p3;
      float s0[VG], s1[VG], b0[VG], b1[VG];
      row_of<VG>(s0, vs, r0); row_of<VG>(s1, vs, r1); row_of<VG>(b0, vb, r0); row_of<VG>(b1, vb, r1);
      if (edge) {  // what lies outside [begin, end) may be anything, NaN included
        const bool in0 = r0 >= skip && r0 < left, in1 = r1 >= skip && r1 < left;
#pragma unroll
        for (int gr = 0; gr < VG; gr++) { if (!in0) s0[gr] = b0[gr] = 0.f; if (!in1) s1[gr] = b1[gr] = 0.f; }
      }
#pragma unroll
      for (int gr = 0; gr < VG; gr++) {
        BS[gr][0] += p0 * b0[gr] + p2 * b1[gr]; BS[gr][1] += p1 * b0[gr] + p3 * b1[gr];
        const u32 f0 = transposed(half_pair(p0 * s0[gr], p1 * s0[gr])), f1 = transposed(half_pair(p2 * s1[gr], p3 * s1[gr]));
        add_codes<VBITS>(acc + gr * 4, vc, mt * 16 + 2 * t, VW, gr, g, f0, f1);
      }
    }
    __syncwarp();
    issue(it + STAGES, st);
    if (++st == STAGES) st = 0;
  }
  wait_but<0>();
  m0 *= back[0]; m1 *= back[1];
#pragma unroll
  for (int i = 0; i < VG * 4; i++) {
    const float f = 16777216.f / (float)(1 << (VBITS == 8 ? 0 : VBITS == 4 ? (i & 1) * 4 : 2 * (i & 3)));
    acc[i][0] *= f; acc[i][1] *= f; acc[i][2] *= f; acc[i][3] *= f;
  }
#pragma unroll
  for (int o = 4; o < 32; o <<= 1) {
    l0 += __shfl_xor_sync(~0u, l0, o); l1 += __shfl_xor_sync(~0u, l1, o);
#pragma unroll
    for (int i = 0; i < VG; i++) { BS[i][0] += __shfl_xor_sync(~0u, BS[i][0], o); BS[i][1] += __shfl_xor_sync(~0u, BS[i][1], o); }
  }
  __syncthreads();
  float* sml = (float*)smem;      // [WARPS][8][2]
  float* sac = sml + WARPS * 16;  // [WARPS][NREP][VD]
  if (g == 0) {
    sml[warp * 16 + 4 * t] = m0; sml[warp * 16 + 4 * t + 1] = l0; sml[warp * 16 + 4 * t + 2] = m1; sml[warp * 16 + 4 * t + 3] = l1;
  }
  __syncthreads();
  float M0 = -1e30f, M1 = -1e30f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) { M0 = fmaxf(M0, sml[w * 16 + 4 * t]); M1 = fmaxf(M1, sml[w * 16 + 4 * t + 2]); }
  const float a0 = exp2_fast(m0 - M0), a1 = exp2_fast(m1 - M1);
#pragma unroll
  for (int gr = 0; gr < VG; gr++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int d = gr * 64 + g * 8 + 4 * r;
      float (*x)[4] = acc + gr * 4;
      if (2 * t < NREP) *(float4*)(sac + (warp * NREP + 2 * t) * VD + d) = make_float4((x[0][r * 2] + BS[gr][0]) * a0, (x[1][r * 2] + BS[gr][0]) * a0, (x[2][r * 2] + BS[gr][0]) * a0, (x[3][r * 2] + BS[gr][0]) * a0);
      if (2 * t + 1 < NREP) *(float4*)(sac + (warp * NREP + 2 * t + 1) * VD + d) = make_float4((x[0][r * 2 + 1] + BS[gr][1]) * a1, (x[1][r * 2 + 1] + BS[gr][1]) * a1, (x[2][r * 2 + 1] + BS[gr][1]) * a1, (x[3][r * 2 + 1] + BS[gr][1]) * a1);
    }
  __syncthreads();
  for (int i = threadIdx.x; i < NREP * VD; i += WARPS * 32) {
    float s = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) s += sac[w * NREP * VD + i];
    pacc[(size_t)(i / VD) * hstride * VD + i % VD] = s;
  }
  if (threadIdx.x < NREP) {
    float M = -1e30f, l = 0;
    for (int w = 0; w < WARPS; w++) M = fmaxf(M, sml[w * 16 + threadIdx.x * 2]);
    for (int w = 0; w < WARPS; w++) l += sml[w * 16 + threadIdx.x * 2 + 1] * exp2_fast(sml[w * 16 + threadIdx.x * 2] - M);
    pml[(size_t)threadIdx.x * hstride * 2] = M; pml[(size_t)threadIdx.x * hstride * 2 + 1] = l;
  }
}

// ---- all splits of NREP heads into one result, by the block that came last ---------------------------------------
template <typename Q, int VD, int NREP, int NT> __device__ __forceinline__ void combine(const float* pacc, const float* pml, int S, char* smem, Q* out, float* lse) {
  float* wt = (float*)smem;
  float* red = wt + ((NREP * S + 3) & ~3);
  constexpr int C = NREP * VD / 4, WAYS = NT / C > 0 ? NT / C : 1;
  const int tid = threadIdx.x, lane = tid & 31;
  for (int h = tid >> 5; h < NREP; h += NT / 32) {
    const float2* ml = (const float2*)pml + h * S;
    float M = -1e30f, L = 0;
    for (int s = lane; s < S; s += 32) M = fmaxf(M, __ldcg(ml + s).x);
    M = warp_max(M);
    for (int s = lane; s < S; s += 32) { const float2 x = __ldcg(ml + s); const float w = exp2_fast(x.x - M); wt[h * S + s] = w; L += w * x.y; }
    L = warp_sum(L);
    const float share = L > 0.f ? 1.f / L : 0.f;  // a query that sees nothing: output 0, lse -inf
    for (int s = lane; s < S; s += 32) wt[h * S + s] *= share;
    if (lane == 0) lse[h] = L > 0.f ? (M + log2f(L)) * 0.69314718055994531f : -INFINITY;
  }
  __syncthreads();
  for (int i = tid; i < C * WAYS; i += NT) {
    const int c = i % C, way = i / C, h = c * 4 / VD, d = c * 4 % VD;
    float4 a = make_float4(0, 0, 0, 0);
#pragma unroll 8
    for (int s = way; s < S; s += WAYS) {
      const float4 x = __ldcg((const float4*)(pacc + (size_t)(h * S + s) * VD + d)); const float w = wt[h * S + s];
      a.x += w * x.x; a.y += w * x.y; a.z += w * x.z; a.w += w * x.w;
    }
    ((float4*)red)[i] = a;
  }
  __syncthreads();
  for (int i = tid; i < NREP * VD; i += NT) {
    float a = 0;
#pragma unroll
    for (int w = 0; w < WAYS; w++) a += red[w * NREP * VD + i];
    out[i] = (Q)a;
  }
}
}  // namespace kvd
