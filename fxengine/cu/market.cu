// fx_market: independent trading environments on real bars; one record advances, begins or observes all of them.
//
// What an action means, what an order does and how accounts are kept: fxengine/rl/market.py, whose NumPy twin has the
// same bits. Hence: everything that is accounted for is float64, in the order written here, with products and sums that
// the compiler must not contract (market_times, market_plus); quotients are correctly rounded on both sides.
//
//   mode 0 step    : reads actions [environments, branches], each 0..2; an action outside gives the reward NaN.
//                    Writes the transition (next_state, reward, done, labels) and the accounts. A finished episode
//                    begins anew in the same step: `next_state` is still the last observation of the old episode,
//                    `observation` the first of the new one.
//   mode 1 reset   : begins an episode in every environment, writes accounts and observation.
//   mode 2 observe : writes the observation of the accounts as they are.
//
//   observation    : [features of the bar, 8 features of the account], see market_position
//   account, clock : a row per quantity (MarketAccount, MarketClock), a column per environment
//   done           : bit 0 terminated (equity at or below `ruin`), bit 1 truncated (the episode's last bar), never both
//   labels         : of the bar that the action was taken at; next-bar labels that look past the episode are -1
//   trace          : row of the bar reached, in the first episode after a reset: equity, position (share of the equity
//                    that it was opened with), turnover, trades
//   first bar      : high 64 bits of (y:x) * (bars - episode_bars), where (x, y, z, w) = Philox4x32-10 with
//     key          = (seed low, seed high)                       seed = counters[3]
//     counter      = (environment, stream, replay low, replay high), bit 31 of the environment set by a reset;
//                    replay = counters[0]. A staggered reset takes the length from (w:z): 1..episode_bars.
//
// Tiles: tile_rows environments (at most 64). One thread does the accounts of an environment, then all threads of the
// block copy rows of features, 16 bytes at a time where the rows allow it.
#include "fx.cuh"

constexpr int MARKET_ROWS = 64;     // most environments of a tile
constexpr int MARKET_FEATURES = 8;  // features of the account

enum MarketMode { MARKET_STEP = 0, MARKET_RESET = 1, MARKET_OBSERVE = 2 };
enum MarketOrder { MARKET_ORDER = 0, LIMIT_ORDER = 1, MID_ORDER = 2 };  // a market order never rests: 0 is none
enum MarketUrgency { PATIENT = 0, NORMAL = 1, URGENT = 2 };
// Rows of the accounts.
enum MarketAccount {
    EQUITY, CASH, UNITS, ENTRY, ORDER_PRICE, ORDER_UNITS, PEAK, DRAWDOWN, TURNOVER,
    FINAL_EQUITY, FINAL_DRAWDOWN, FINAL_TURNOVER
};
enum MarketClock { BAR, START, END, LEVEL, HELD, ORDER_TYPE, ORDER_LEVEL, TRADES, EPISODES, FINAL_BARS, FINAL_TRADES };

struct Market {
    int first_tile;
    int tiles;
    const double* prices;                // [bars, 4] open, high, low, close
    const float* features;               // [bars, width]
    const int* next_bar;                 // [bars] labels
    const int* regime;                   // [bars] labels
    const float* fee;                    // signal: share of the traded value
    const float* spread;                 // signal: share of the price
    const float* urgency_cost;           // signal: share of the price
    const unsigned long long* counters;  // 4 counters: see step.cu
    const int* actions;                  // [environments, branches]; null unless mode 0, like the outputs of a step
    double* account;                     // [12, environments]
    int* clock;                          // [11, environments]
    float* next_state;                   // [environments, width + 8]
    float* observation;                  // [environments, width + 8], or null
    float* reward;                       // [environments]
    int* done;                           // [environments]
    int* next_bar_label;                 // [environments], or null
    int* regime_label;                   // [environments], or null
    double* trace;                       // [bars, 4, environments], or null
    long long actions_stride;            // words between rows
    long long next_stride;               // words between rows
    long long observation_stride;        // words between rows
    double size;                         // position of one level, as a share of the equity
    double offset_patient;               // distance of a limit order from the close, as a share of it
    double offset_normal;
    double offset_urgent;
    double ruin;                         // equity that ends an episode; it begins with 1
    double reward_scale;
    double per_range;                    // 1 / typical range of a bar, as a share of the price
    double held_half;                    // bars held at which that feature is 1/2
    int bars;
    int width;                           // features of a bar
    int environments;
    int branches;                        // 1..4
    int episode_bars;                    // steps of a whole episode, below `bars`
    int lookahead;                       // bars that a next-bar label looks ahead
    int tile_rows;
    int mode;
    int stagger;                         // 1 = first episodes of random length
    unsigned stream;                     // random stream of the first bars
};

// One environment. Rows in the order of the enumerations.
struct MarketState {
    double equity, cash, units, entry, order_price, order_units, peak, drawdown, turnover;
    int bar, start, end, level, held, order_type, order_level, trades;
};

// What the copying threads must know of the environments of a block.
struct MarketTile {
    int bar[MARKET_ROWS];    // of next_state (in a reset or observation: of the observation)
    int begun[MARKET_ROWS];  // first bar of the episode that begins, or -1
    alignas(16) float position[MARKET_ROWS][MARKET_FEATURES];
    alignas(16) float fresh[MARKET_FEATURES];  // of an episode that begins
};

__device__ __forceinline__ double market_times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double market_plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double market_minus(double a, double b) { return __dadd_rn(a, -b); }

// visit(quantity, row) for every quantity of the accounts that a step carries on.
template <class Account, class Clock>
__device__ __forceinline__ void market_each(MarketState& state, Account account, Clock clock) {
    account(state.equity, EQUITY), account(state.cash, CASH), account(state.units, UNITS), account(state.entry, ENTRY);
    account(state.order_price, ORDER_PRICE), account(state.order_units, ORDER_UNITS);
    account(state.peak, PEAK), account(state.drawdown, DRAWDOWN), account(state.turnover, TURNOVER);
    clock(state.bar, BAR), clock(state.start, START), clock(state.end, END), clock(state.level, LEVEL);
    clock(state.held, HELD), clock(state.order_type, ORDER_TYPE), clock(state.order_level, ORDER_LEVEL);
    clock(state.trades, TRADES);
}

__device__ __forceinline__ MarketState market_load(const Market& record, int e) {
    const long long n = record.environments;
    MarketState state;
    market_each(
        state, [&](double& quantity, int row) { quantity = record.account[row * n + e]; },
        [&](int& quantity, int row) { quantity = record.clock[row * n + e]; });
    return state;
}

__device__ __forceinline__ void market_store(const Market& record, int e, MarketState& state) {
    const long long n = record.environments;
    market_each(
        state, [&](double quantity, int row) { record.account[row * n + e] = quantity; },
        [&](int quantity, int row) { record.clock[row * n + e] = quantity; });
}

// Figures of the episode that has just ended.
__device__ __forceinline__ void market_conclude(const Market& record, int e, const MarketState& state) {
    const long long n = record.environments;
    double* account = record.account + e;
    int* clock = record.clock + e;
    account[FINAL_EQUITY * n] = state.equity;
    account[FINAL_DRAWDOWN * n] = state.drawdown;
    account[FINAL_TURNOVER * n] = state.turnover;
    clock[EPISODES * n] += 1;
    clock[FINAL_BARS * n] = state.bar - state.start;
    clock[FINAL_TRADES * n] = state.trades;
}

// No episode has ended yet.
__device__ __forceinline__ void market_forget(const Market& record, int e) {
    const long long n = record.environments;
    for (int row = FINAL_EQUITY; row <= FINAL_TURNOVER; ++row) record.account[row * n + e] = 0.0;
    for (int row = EPISODES; row <= FINAL_TRADES; ++row) record.clock[row * n + e] = 0;
}

__device__ __forceinline__ MarketState market_begin(const Market& record, int e) {
    const bool reset = record.mode == MARKET_RESET;
    const FxPhilox bits = fx_random_bits(record.counters[3], record.counters[0], record.stream,
                                         static_cast<unsigned>(e) | (reset ? 0x80000000u : 0u));
    const u64 starts = static_cast<u64>(record.bars - record.episode_bars);
    const int start = static_cast<int>(__umul64hi((static_cast<u64>(bits.y) << 32) | bits.x, starts));
    int length = record.episode_bars;
    if (reset && record.stagger != 0) {
        const u64 draw = (static_cast<u64>(bits.w) << 32) | bits.z;
        length = 1 + static_cast<int>(__umul64hi(draw, static_cast<u64>(record.episode_bars)));
    }
    MarketState state = {};
    state.equity = state.cash = state.peak = 1.0;
    state.bar = state.start = start;
    state.end = start + length;
    return state;
}

struct MarketCosts {
    double half, fee, late;  // half a spread, the fee, the cost of a late completion
};

__device__ __forceinline__ MarketCosts market_costs(const Market& record) {
    return MarketCosts{market_times(0.5, static_cast<double>(*record.spread)), static_cast<double>(*record.fee),
                       static_cast<double>(*record.urgency_cost)};
}

// Features of the account: side, size, profit since entry, bars held; side, target and distance of the resting order;
// cost of a market order. Prices are compared in typical ranges of a bar.
__device__ __forceinline__ void market_position(const Market& record, const MarketState& state, double close,
                                                const MarketCosts& costs, float* out) {
    constexpr double third = 1.0 / 3.0;
    const double side = state.level > 0 ? 1.0 : state.level < 0 ? -1.0 : 0.0;
    const double held = static_cast<double>(state.held);
    const double level = static_cast<double>(state.level);
    out[0] = static_cast<float>(side);
    out[1] = static_cast<float>(market_times(market_times(side, level), third));
    out[2] = 0.0f;
    if (state.level != 0) {
        const double profit = market_times(market_minus(close, state.entry) / state.entry, side);
        out[2] = static_cast<float>(market_times(profit, record.per_range));
    }
    out[3] = static_cast<float>(held / market_plus(held, record.held_half));
    out[4] = out[5] = out[6] = 0.0f;
    if (state.order_type != MARKET_ORDER) {
        out[4] = state.order_units < state.units ? -1.0f : 1.0f;
        out[5] = static_cast<float>(market_times(static_cast<double>(state.order_level), third));
        out[6] = static_cast<float>(market_times(market_minus(state.order_price, close) / close, record.per_range));
    }
    out[7] = static_cast<float>(market_times(market_plus(costs.half, costs.fee), record.per_range));
}

struct MarketBar {
    double open, high, low, close;
};

__device__ __forceinline__ MarketBar market_bar(const Market& record, int bar) {
    const double2* row = reinterpret_cast<const double2*>(record.prices) + 2ll * bar;
    return MarketBar{row[0].x, row[0].y, row[1].x, row[1].y};
}

// Carries out the order at `price`: cash, units, entry price, figures.
__device__ __forceinline__ void market_settle(MarketState& state, double price, const MarketCosts& costs) {
    const double delta = market_minus(state.order_units, state.units);
    const double value = market_times(delta, price);
    const double size = fabs(value);
    state.cash = market_minus(market_minus(state.cash, value), market_times(costs.fee, size));
    state.turnover = market_plus(state.turnover, size / state.equity);
    state.trades += 1;
    const double before = fabs(state.units), after = fabs(state.order_units);
    if (state.order_level == 0) {
        state.entry = 0.0;
    } else if (state.level * state.order_level <= 0) {
        state.entry = price;
    } else if (after > before) {
        const double paid = market_plus(market_times(state.entry, before), market_times(price, fabs(delta)));
        state.entry = paid / after;
    }
    state.units = state.order_units;
    state.level = state.order_level;
}

__device__ __forceinline__ void market_cancel(MarketState& state) {
    state.order_type = MARKET_ORDER;
    state.order_level = 0;
    state.order_price = state.order_units = 0.0;
}

// The order that an action taken at `close` stands for, and what the next bar makes of it.
__device__ __forceinline__ void market_trade(const Market& record, MarketState& state, const int* action, double close,
                                             const MarketBar& next, const MarketCosts& costs) {
    const int magnitude = record.branches > 1 ? action[1] + 1 : 3;
    const int type = record.branches > 2 ? action[2] : MARKET_ORDER;
    const int urgency = record.branches > 3 ? action[3] : NORMAL;
    const int level = (action[0] - 1) * magnitude;
    if (level == state.level) {
        market_cancel(state);
        return;
    }
    const bool same = type == state.order_type && level == state.order_level;
    if (type == MARKET_ORDER || urgency != PATIENT || !same) {
        const double share = market_times(static_cast<double>(level), record.size);
        state.order_type = type;
        state.order_level = level;
        state.order_units = market_times(share, state.equity) / close;
        state.order_price = close;
        if (type == LIMIT_ORDER) {
            const double offset = urgency == PATIENT  ? record.offset_patient
                                  : urgency == NORMAL ? record.offset_normal
                                                      : record.offset_urgent;
            const double away = state.order_units < state.units ? offset : -offset;
            state.order_price = market_times(close, market_plus(1.0, away));
        }
    }
    const double side = state.order_units < state.units ? -1.0 : 1.0;
    double price = state.order_price;
    bool filled = true;
    if (type == MARKET_ORDER) {
        price = market_times(next.open, market_plus(1.0, market_times(side, costs.half)));
    } else if (type == MID_ORDER) {
        filled = next.low <= price && price <= next.high;
    } else if (side > 0.0) {
        filled = next.low <= price;
        price = next.open < price ? next.open : price;
    } else {
        filled = next.high >= price;
        price = next.open > price ? next.open : price;
    }
    if (!filled && urgency == URGENT) {
        filled = true;
        price = market_times(next.close, market_plus(1.0, market_times(side, market_plus(costs.half, costs.late))));
    }
    if (filled) market_settle(state, price, costs);
    if (filled || urgency != PATIENT) market_cancel(state);
}

__device__ __forceinline__ void market_trace(const Market& record, int e, const MarketState& state) {
    if (record.trace == nullptr || record.clock[1ll * EPISODES * record.environments + e] != 0) return;
    double* row = record.trace + 4ll * state.bar * record.environments + e;
    row[0] = state.equity;
    row[1ll * record.environments] = market_times(static_cast<double>(state.level), record.size);
    row[2ll * record.environments] = state.turnover;
    row[3ll * record.environments] = static_cast<double>(state.trades);
}

// One step of environment e. Returns the state reached; writes everything but the observations.
__device__ __forceinline__ MarketState market_step(const Market& record, int e, const MarketCosts& costs) {
    MarketState state = market_load(record, e);
    const int* action = record.actions + e * record.actions_stride;
    bool valid = true;
    for (int k = 0; k < record.branches; ++k) valid = valid && static_cast<unsigned>(action[k]) < 3u;
    const int at = state.bar;
    const double close = record.prices[4ll * at + 3];
    const MarketBar next = market_bar(record, at + 1);
    const int level = state.level;
    market_trade(record, state, action, close, next, costs);
    state.held = level * state.level > 0 ? state.held + 1 : 0;
    state.bar = at + 1;
    const double before = state.equity;
    state.equity = market_plus(state.cash, market_times(state.units, next.close));
    const double earned = market_minus(state.equity, before) / before;
    if (state.equity > state.peak) state.peak = state.equity;
    const double fallen = market_minus(state.peak, state.equity) / state.peak;
    if (fallen > state.drawdown) state.drawdown = fallen;
    const bool terminated = state.equity <= record.ruin;
    const bool truncated = !terminated && state.bar == state.end;
    const float reward = static_cast<float>(market_times(earned, record.reward_scale));
    record.reward[e] = valid ? reward : __uint_as_float(0x7fffffffu);
    record.done[e] = terminated ? 1 : truncated ? 2 : 0;
    if (record.next_bar_label != nullptr) {
        record.next_bar_label[e] = at + record.lookahead <= state.end ? record.next_bar[at] : -1;
    }
    if (record.regime_label != nullptr) record.regime_label[e] = record.regime[at];
    market_trace(record, e, state);
    return state;
}

template <class Word>
__device__ __forceinline__ void market_copy(const Market& record, const MarketTile& tile, int first, int rows) {
    constexpr int lanes = sizeof(Word) / sizeof(float);
    const int width = record.width / lanes, full = width + MARKET_FEATURES / lanes;
    const Word* fresh = reinterpret_cast<const Word*>(tile.fresh);
    for (int i = static_cast<int>(threadIdx.x); i < full * rows; i += 256) {
        const int row = i / full, column = i - row * full;
        const long long e = first + row;
        const auto feature = [&](int bar) {
            return reinterpret_cast<const Word*>(record.features + static_cast<long long>(bar) * record.width)[column];
        };
        const Word* position = reinterpret_cast<const Word*>(tile.position[row]);
        Word value = column < width ? feature(tile.bar[row]) : position[column - width];
        if (record.mode == MARKET_STEP) {
            reinterpret_cast<Word*>(record.next_state + e * record.next_stride)[column] = value;
        }
        if (record.observation == nullptr) continue;
        if (tile.begun[row] >= 0) value = column < width ? feature(tile.begun[row]) : fresh[column - width];
        reinterpret_cast<Word*>(record.observation + e * record.observation_stride)[column] = value;
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) fx_market(const Market* table, int count) {
    __shared__ MarketTile shared;
    __shared__ Market place;
    int tile;
    const Market& record = fx_record(table, count, tile, place);
    fx_wait();
    fx_trigger();
    const int first = tile * record.tile_rows;
    const int rows = min(record.environments - first, record.tile_rows);
    if (const int row = static_cast<int>(threadIdx.x), e = first + row; row < rows) {
        const MarketCosts costs = market_costs(record);
        MarketState state;
        if (record.mode == MARKET_STEP) {
            state = market_step(record, e, costs);
        } else if (record.mode == MARKET_RESET) {
            market_forget(record, e);
            state = market_begin(record, e);
            market_trace(record, e, state);
        } else {
            state = market_load(record, e);
        }
        shared.bar[row] = state.bar;
        shared.begun[row] = -1;
        market_position(record, state, record.prices[4ll * state.bar + 3], costs, shared.position[row]);
        if (row == 0) {  // no position, no order; the cost of a market order is that of all
            for (int k = 0; k < MARKET_FEATURES; ++k) shared.fresh[k] = k < 7 ? 0.0f : shared.position[0][7];
        }
        if (record.mode == MARKET_STEP && (state.equity <= record.ruin || state.bar == state.end)) {
            market_conclude(record, e, state);
            state = market_begin(record, e);
            shared.begun[row] = state.bar;
        }
        if (record.mode != MARKET_OBSERVE) market_store(record, e, state);
    }
    __syncthreads();
    const u64 odd = reinterpret_cast<u64>(record.features) | reinterpret_cast<u64>(record.next_state) |
                    reinterpret_cast<u64>(record.observation) |
                    static_cast<u64>(4 * (record.width | record.next_stride | record.observation_stride));
    if ((odd & 15) == 0) {
        market_copy<float4>(record, shared, first, rows);
    } else {
        market_copy<float>(record, shared, first, rows);
    }
}
