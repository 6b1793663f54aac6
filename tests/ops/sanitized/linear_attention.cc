// A token through mixers of odd sizes, against the formulas in double.

#include "../../../jaxwafer/ops/linear_attention/cpu.cc"

#include <cstdio>

namespace {

double Sigma(double x) { return 1 / (1 + std::exp(-x)); }

template <class T>
int Wrong(int64_t groups, int64_t each, int64_t keys, int64_t values, bool channels, int taps, bool fresh, float bound) {
  int64_t heads = groups * each, rows = 2;
  int wrong = 0;
  Sizes n{1, heads, groups, keys, values, channels ? keys : 1, rows, taps};
  T before;
  Narrow(0.5f, before);
  auto filled = [](int64_t size, float value) { return std::vector<float>(size, value); };
  std::vector<float> q = filled(groups * keys, 1), v = filled(heads * values, 2), z = filled(heads * n.decays, 0.3f);
  std::vector<float> taken = filled(groups * keys * taps, 0.25f), more = filled(heads * values * taps, 0.25f);
  std::vector<T> q_past((taps - 1) * rows * groups * keys, before), k_past = q_past;
  std::vector<T> v_past((taps - 1) * rows * heads * values, before);
  std::vector<float> beta = filled(heads, 0.1f), gate = filled(heads * values, 0.7f), norm = filled(values, 1.5f);
  std::vector<float> bias = filled(heads * n.decays, 0.2f), rate = filled(heads, -0.5f);
  std::vector<float> state = filled(rows * heads * keys * values, 0.7f), out = filled(heads * values, NAN);
  int32_t slot = 1, start = fresh ? 0 : 9;
  Rest rest{z.data(), beta.data(), gate.data(), bias.data(), rate.data(), norm.data(), &slot, &start,
            state.data(), out.data(), 1e-5f, bound, true};
  for (int64_t g = 0; g < groups; ++g)
    Group<T>(n, {q.data(), taken.data(), q_past.data()}, {q.data(), taken.data(), k_past.data()},
             {v.data(), more.data(), v_past.data()}, rest, 0, g);
  double past = fresh ? 0 : 0.5 * (taps - 1), y = 0.25 * (past + 1), silu = y * Sigma(y);
  double key = silu / std::sqrt(keys * silu * silu + 1e-6), query = key / std::sqrt(double(keys));
  double w = 0.25 * (past + 2), value = w * Sigma(w), r = std::exp(-0.5);
  double decay = std::exp(bound == bound ? bound * Sigma(r * 0.5) : -r * std::log1p(std::exp(0.5)));
  double held = fresh ? 0 : 0.7 * decay, after = held + key * Sigma(0.1) * (value - keys * key * held);
  double o = keys * query * after, normed = o / std::sqrt(o * o + 1e-5) * 1.5 * 0.7 * Sigma(0.7);
  for (int64_t i = 0; i < int64_t(state.size()); ++i)
    wrong += !(std::fabs(state[i] - (i < heads * keys * values ? 0.7 : after)) < 1e-5);
  for (float found : out) wrong += !(std::fabs(found - normed) < 1e-5);
  // The other request's inputs are as they were; this one's have moved up.
  for (int64_t i = 0; i < int64_t(v_past.size()); ++i) {
    int64_t row = i / (heads * values), tap = row % std::max(taps - 1, 1);
    float wanted = row < taps - 1 ? 0.5f : tap == taps - 2 ? 2.0f : fresh ? 0.0f : 0.5f;
    wrong += Widen(v_past[i]) != wanted;
  }
  return wrong;
}

}  // namespace

int main() {
  int wrong = 0;
  for (int64_t keys : {1, 5, 32})
    for (int64_t values : {1, 7, 40})
      for (int taps : {1, 4, 8})
        for (int64_t groups : {1, 3})
          for (bool fresh : {false, true}) {
            wrong += Wrong<float>(groups, 2, keys, values, false, taps, fresh, NAN);
            wrong += Wrong<uint16_t>(groups, 1, keys, values, true, taps, fresh, -5);
            wrong += Wrong<float>(groups, 1, keys, values, true, taps, fresh, NAN);
          }
  if (wrong) std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
