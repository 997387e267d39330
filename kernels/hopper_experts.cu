// Grouped matrix products of the routed experts on Hopper (sm_90a): one launch multiplies every expert's tokens with that expert's weights.
//
// Rows are (token, choice) pairs in the order of their experts; `ends[e]` is where expert e's rows end. A cluster of two blocks takes a tile of 128 rows
// and two neighbouring blocks of columns: each loads half of the rows' values and the copy engine writes them into both blocks' shared memory. In a
// block, one thread starts copies and two warpgroups multiply 64 rows each by 256 rows of weights; a warpgroup without rows does not multiply.
// Clusters stay for the whole launch and take the next piece of work when they have room for it: what runs at one time lies close together, so weights
// that several tiles need are read from memory once; and the next piece's copies run while results are written.
//
// Compiled twice. GATED: the weights' 256 rows are 128 of the linear half and the 128 of the gate that belong to them; stored is linear * silu(gate).
// Otherwise the products themselves are stored, 256 columns wide, with the sum running over all micro shards.
//
// Shared memory of a stage: 128 x 64 values of rows, then 256 x 64 of weights, both in the 128-byte swizzle that copies and wgmma agree on.

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 opaque[16];
};

constexpr int ROWS = 128, HALF_ROWS = 64, DEPTH = 64;
constexpr int STORED = GATED ? 128 : 256;
constexpr int STAGES = GATED ? 4 : 3;
constexpr u32 ROW_BYTES = DEPTH * 2;
constexpr u32 TOKENS_BYTES = ROWS * ROW_BYTES, WEIGHTS_BYTES = 256 * ROW_BYTES;
constexpr u32 STAGE_BYTES = TOKENS_BYTES + WEIGHTS_BYTES;
// Results on their way out, in boxes of 64 columns that are swizzled too.
constexpr u32 BOX_BYTES = HALF_ROWS * ROW_BYTES;
constexpr u32 STAGING_BYTES = STORED / 64 * BOX_BYTES;
constexpr u32 BARRIERS_AT = STAGES * STAGE_BYTES + 2 * STAGING_BYTES;
constexpr int CLUSTER = 2, MULTIPLIERS = 2;
// Two places for the number of the next piece, each with a barrier for its coming and one for its having been read.
constexpr u32 NEXT_AT = BARRIERS_AT + 2 * STAGES * 8;
constexpr u32 FIRST_UNIT_AT = NEXT_AT + 2 * (8 + 8 + 8);
constexpr u32 READERS = CLUSTER * (1 + MULTIPLIERS * 4);

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for(u32 barrier, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
    } while (!done);
}

// In plain form: with a release at cluster scope the compiler adds a fence for all memory, which costs as much as a step. Nothing was written that
// somebody else reads: who waits for the barrier only wants the stage to be free.
__device__ __forceinline__ void arrive_at(u32 barrier, u32 block) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ u32 address_in(u32 address, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

// The number of the next piece, from the cluster's first block to everybody in it.
struct Announcement {
    u32 places;
    u32 count;

    __device__ __forceinline__ u32 come() const { return places + count % 2 * 8; }
    __device__ __forceinline__ u32 read() const { return places + 16 + count % 2 * 8; }
    __device__ __forceinline__ u32 value() const { return places + 32 + count % 2 * 8; }
    __device__ __forceinline__ u32 parity() const { return count / 2 % 2; }

    __device__ __forceinline__ void send(int unit) const {
        wait_for(read(), parity() ^ 1);
        for (u32 block = 0; block < CLUSTER; ++block)
            asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(address_in(value(), block)), "r"(unit),
                         "r"(address_in(come(), block))
                         : "memory");
    }

    // `leader`: the one thread of its warp, or of its block, that says that the number has been read.
    __device__ __forceinline__ int receive(bool leader) {
        int unit;
        wait_for(come(), parity());
        asm volatile("ld.shared.s32 %0, [%1];" : "=r"(unit) : "r"(value()) : "memory");
        __syncwarp(__activemask());
        if (leader) arrive_at(read(), 0);
        ++count;
        return unit;
    }
};

__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap &map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map), "r"(column),
        "r"(row), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void copy_tile_to_both(u32 to, const TensorMap &map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3)
        : "memory");
}

// Rows of 128 bytes in swizzled groups of eight.
__device__ __forceinline__ u64 matrix_at(u32 address) {
    return u64((address & 0x3FFFF) >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// acc [64, 256] (+)= rows [64, 16] * weights [256, 16]^T for the whole warpgroup.
__device__ __forceinline__ void multiply(float (&acc)[128], u64 rows, u64 weights, u32 add) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %130, 0; wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
        "%128, %129, p, 1, 1, 0, 0; }"
        :
        "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3]), "+f"(acc[4]), "+f"(acc[5]), "+f"(acc[6]), "+f"(acc[7]),
        "+f"(acc[8]), "+f"(acc[9]), "+f"(acc[10]), "+f"(acc[11]), "+f"(acc[12]), "+f"(acc[13]), "+f"(acc[14]), "+f"(acc[15]),
        "+f"(acc[16]), "+f"(acc[17]), "+f"(acc[18]), "+f"(acc[19]), "+f"(acc[20]), "+f"(acc[21]), "+f"(acc[22]), "+f"(acc[23]),
        "+f"(acc[24]), "+f"(acc[25]), "+f"(acc[26]), "+f"(acc[27]), "+f"(acc[28]), "+f"(acc[29]), "+f"(acc[30]), "+f"(acc[31]),
        "+f"(acc[32]), "+f"(acc[33]), "+f"(acc[34]), "+f"(acc[35]), "+f"(acc[36]), "+f"(acc[37]), "+f"(acc[38]), "+f"(acc[39]),
        "+f"(acc[40]), "+f"(acc[41]), "+f"(acc[42]), "+f"(acc[43]), "+f"(acc[44]), "+f"(acc[45]), "+f"(acc[46]), "+f"(acc[47]),
        "+f"(acc[48]), "+f"(acc[49]), "+f"(acc[50]), "+f"(acc[51]), "+f"(acc[52]), "+f"(acc[53]), "+f"(acc[54]), "+f"(acc[55]),
        "+f"(acc[56]), "+f"(acc[57]), "+f"(acc[58]), "+f"(acc[59]), "+f"(acc[60]), "+f"(acc[61]), "+f"(acc[62]), "+f"(acc[63]),
        "+f"(acc[64]), "+f"(acc[65]), "+f"(acc[66]), "+f"(acc[67]), "+f"(acc[68]), "+f"(acc[69]), "+f"(acc[70]), "+f"(acc[71]),
        "+f"(acc[72]), "+f"(acc[73]), "+f"(acc[74]), "+f"(acc[75]), "+f"(acc[76]), "+f"(acc[77]), "+f"(acc[78]), "+f"(acc[79]),
        "+f"(acc[80]), "+f"(acc[81]), "+f"(acc[82]), "+f"(acc[83]), "+f"(acc[84]), "+f"(acc[85]), "+f"(acc[86]), "+f"(acc[87]),
        "+f"(acc[88]), "+f"(acc[89]), "+f"(acc[90]), "+f"(acc[91]), "+f"(acc[92]), "+f"(acc[93]), "+f"(acc[94]), "+f"(acc[95]),
        "+f"(acc[96]), "+f"(acc[97]), "+f"(acc[98]), "+f"(acc[99]), "+f"(acc[100]), "+f"(acc[101]), "+f"(acc[102]), "+f"(acc[103]),
        "+f"(acc[104]), "+f"(acc[105]), "+f"(acc[106]), "+f"(acc[107]), "+f"(acc[108]), "+f"(acc[109]), "+f"(acc[110]), "+f"(acc[111]),
        "+f"(acc[112]), "+f"(acc[113]), "+f"(acc[114]), "+f"(acc[115]), "+f"(acc[116]), "+f"(acc[117]), "+f"(acc[118]), "+f"(acc[119]),
        "+f"(acc[120]), "+f"(acc[121]), "+f"(acc[122]), "+f"(acc[123]), "+f"(acc[124]), "+f"(acc[125]), "+f"(acc[126]), "+f"(acc[127])
        : "l"(rows), "l"(weights), "r"(add));
}

template <int LEFT>
__device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ u32 two_bf16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float gated(float linear, float gate) { return __fdividef(linear * gate, 1.0f + __expf(-gate)); }

__device__ __forceinline__ void await_warpgroup(u32 multiplier) {
    if (multiplier)
        asm volatile("bar.sync 2, 128;" ::: "memory");
    else
        asm volatile("bar.sync 1, 128;" ::: "memory");
}

// Equal in all lanes, and known to be.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }

// Where the pieces of work lie: piece `unit` -> the expert, its rows, and the cluster's pair of column blocks.
struct Piece {
    int expert, first_row, rows, columns;
};

struct Pieces {
    const int *first_unit;  // [experts + 1], in shared memory
    const int *ends;
    int experts, pairs, expert;

    __device__ __forceinline__ bool find(int unit, Piece &piece) {
        while (expert < experts && unit >= first_unit[expert + 1]) ++expert;
        if (expert == experts) return false;
        int within = unit - first_unit[expert], tiles = (first_unit[expert + 1] - first_unit[expert]) / pairs;
        int start = expert ? ends[expert - 1] : 0;
        piece.expert = expert;
        piece.columns = within / tiles;
        piece.first_row = start + within % tiles * ROWS;
        piece.rows = min(ROWS, ends[expert] - piece.first_row);
        return true;
    }
};

// `first_unit[e]`: pieces of all experts before e. One warp.
__device__ __forceinline__ void count_units(const int *ends, int experts, int pairs, int *first_unit) {
    int lane = threadIdx.x % 32, before = 0;
    for (int base = 0; base < experts; base += 32) {
        int expert = base + lane, units = 0;
        if (expert < experts) units = (ends[expert] - (expert ? ends[expert - 1] : 0) + ROWS - 1) / ROWS * pairs;
        for (int step = 1; step < 32; step *= 2) {
            int other = __shfl_up_sync(0xFFFFFFFF, units, step);
            if (lane >= step) units += other;
        }
        if (expert < experts) first_unit[expert + 1] = before + units;
        before += __shfl_sync(0xFFFFFFFF, units, 31);
    }
    if (lane == 0) first_unit[0] = 0;
}

// taken: 0 before the launch. pairs: of column blocks, all together. blocks: column blocks of one micro shard where GATED, of all else. steps: of 64
// over the whole depth; micro_steps: of one micro shard. Strides count elements, rows of weights are those of the whole matrix.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(128 * (1 + MULTIPLIERS), 1)
    multiply_groups(const __grid_constant__ TensorMap tokens, const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap results,
                    const int *__restrict__ ends, int *__restrict__ taken, unsigned short *__restrict__ out, int out_stride, int experts, int pairs,
                    int blocks, int steps, int micro_steps, int gate_rows, int expert_rows, int micro_rows, int micro_columns) {
    extern __shared__ __align__(1024) unsigned char shared[];
    u32 base = u32(__cvta_generic_to_shared(shared));
    u32 full = base + BARRIERS_AT, empty = full + STAGES * 8;
    int *first_unit = reinterpret_cast<int *>(shared + FIRST_UNIT_AT);
    u32 block;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) {
            for (int stage = 0; stage < STAGES; ++stage) {
                init_barrier(full + stage * 8, 1);
                init_barrier(empty + stage * 8, CLUSTER * MULTIPLIERS);
            }
            for (int place = 0; place < 2; ++place) {
                init_barrier(base + NEXT_AT + place * 8, 1);
                init_barrier(base + NEXT_AT + 16 + place * 8, READERS);
            }
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        count_units(ends, experts, pairs, first_unit);
    }
    __syncthreads();
    meet_cluster();
    Pieces pieces{first_unit, ends, experts, pairs, 0};
    Piece piece;
    Announcement next{base + NEXT_AT, 0};
    int warpgroup = uniform(threadIdx.x / 128), unit = blockIdx.x / CLUSTER;
    u32 stage = 0, parity = 0;
    if (warpgroup == 0) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) {
            while (pieces.find(unit, piece)) {
                // The answer is only needed behind the copies of this piece.
                int following = block == 0 ? int(gridDim.x / CLUSTER) + atomicAdd(taken, 1) : 0;
                int column_block = piece.columns * CLUSTER + block;
                int row = piece.expert * expert_rows;
                if (GATED)
                    row += column_block / blocks * micro_rows + column_block % blocks * STORED;
                else
                    row += column_block * STORED;
                int second = row + (GATED ? gate_rows : 128);
                int micro = 0, inner = 0;
                for (int step = 0; step < steps; ++step) {
                    wait_for(empty + stage * 8, parity ^ 1);
                    u32 ready = full + stage * 8, to = base + stage * STAGE_BYTES;
                    expect_bytes(ready, STAGE_BYTES);
                    copy_tile_to_both(to + block * HALF_ROWS * ROW_BYTES, tokens, step * DEPTH, piece.first_row + block * HALF_ROWS, ready);
                    int column = inner * DEPTH + micro * micro_columns, shift = GATED ? 0 : micro * micro_rows;
                    copy_tile(to + TOKENS_BYTES, weights, column, row + shift, ready);
                    copy_tile(to + TOKENS_BYTES + WEIGHTS_BYTES / 2, weights, column, second + shift, ready);
                    if (++inner == micro_steps) inner = 0, ++micro;
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                if (block == 0) next.send(following);
                expect_bytes(next.come(), 4);
                unit = next.receive(true);
            }
        }
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 multiplier = warpgroup - 1, thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32;
        u32 staging = base + STAGES * STAGE_BYTES + multiplier * STAGING_BYTES;
        float acc[128];
        for (; uniform(pieces.find(unit, piece)); unit = next.receive(lane == 0)) {
            int rows = uniform(piece.rows) - int(multiplier) * HALF_ROWS;
            if (rows <= 0) {
                for (int step = 0; step < steps; ++step) {
                    wait_for(full + stage * 8, parity);
                    // Without products nothing keeps the four warps together, and one that falls two turns behind would take the next phase for this one.
                    await_warpgroup(multiplier);
                    if (thread < CLUSTER) arrive_at(empty + stage * 8, thread);
                    if (++stage == STAGES) stage = 0, parity ^= 1;
                }
                continue;
            }
            u32 before = 0;
            for (int step = 0; step < steps; ++step) {
                wait_for(full + stage * 8, parity);
                u64 a = matrix_at(base + stage * STAGE_BYTES + multiplier * HALF_ROWS * ROW_BYTES);
                u64 b = matrix_at(base + stage * STAGE_BYTES + TOKENS_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int slice = 0; slice < DEPTH / 16; ++slice) multiply(acc, a + 2 * slice, b + 2 * slice, step + slice);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                // The products of the step before are done, so its stage may be written again, in both blocks.
                await_products<1>();
                if (step && thread < CLUSTER) arrive_at(empty + before * 8, thread);
                before = stage;
                if (++stage == STAGES) stage = 0, parity ^= 1;
            }
            await_products<0>();
            if (thread < CLUSTER) arrive_at(empty + before * 8, thread);
            // The tile before may still be on its way out of this memory.
            if (thread == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            await_warpgroup(multiplier);
            u32 matrix = lane / 8, line = staging + (warp * 16 + lane % 8 + matrix % 2 * 8) * ROW_BYTES;
#pragma unroll
            for (int group = 0; group < STORED / 8; group += 2) {
                u32 packed[4];
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    int at = group * 4 + part * 2;
                    if (GATED)
                        packed[part] = two_bf16(gated(acc[at % 64], acc[64 + at % 64]), gated(acc[at % 64 + 1], acc[64 + at % 64 + 1]));
                    else
                        packed[part] = two_bf16(acc[at], acc[at + 1]);
                }
                u32 to = line + group / 8 * BOX_BYTES + ((group % 8 + matrix / 2) ^ lane % 8) * 16;
                asm volatile("stmatrix.sync.aligned.m8n8.x4.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(packed[0]), "r"(packed[1]),
                             "r"(packed[2]), "r"(packed[3])
                             : "memory");
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            await_warpgroup(multiplier);
            int first = piece.first_row + int(multiplier) * HALF_ROWS, column = (piece.columns * CLUSTER + int(block)) * STORED;
            if (rows < HALF_ROWS) {
                // What follows belongs to the next expert.
                for (int chunk = thread; chunk < rows * (STORED / 8); chunk += 128) {
                    int row = chunk / (STORED / 8), place = chunk % (STORED / 8);
                    u32 from = staging + place / 8 * BOX_BYTES + row * ROW_BYTES + (place % 8 ^ row % 8) * 16;
                    uint4 values;
                    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(values.x), "=r"(values.y), "=r"(values.z), "=r"(values.w)
                                 : "r"(from)
                                 : "memory");
                    *reinterpret_cast<uint4 *>(out + u64(first + row) * out_stride + column + place * 8) = values;
                }
            } else if (thread == 0) {
                for (int box = 0; box < STORED / 64; ++box)
                    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&results), "r"(column + box * 64),
                                 "r"(first), "r"(staging + box * BOX_BYTES)
                                 : "memory");
                asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            }
        }
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
    // Nobody leaves while the other block may still write to its shared memory.
    meet_cluster();
}
