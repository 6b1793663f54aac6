// A step on states of odd sizes against the recurrence in double.

#include "../../../jaxwafer/ops/delta_rule/cpu.cc"

#include <cmath>
#include <cstdio>

int main() {
  int wrong = 0;
  for (int64_t keys : {1, 5, 32})
    for (int64_t values : {1, 7, 40, 128})
      for (bool fresh : {false, true}) {
        std::vector<float> q(keys, 0.3f), k(keys, 0.2f), v(values, 1.5f), decay(keys, 0.9f), state(keys * values, 0.7f);
        std::vector<float> out(values);
        Step({q.data(), k.data(), v.data(), decay.data(), 0.5f, state.data(), out.data(), keys, values, fresh});
        double before = fresh ? 0 : 0.7 * 0.9, update = 0.5 * (1.5 - keys * 0.2 * before), after = before + 0.2 * update;
        for (float s : state) wrong += !(std::fabs(s - after) < 1e-5);
        for (float o : out) wrong += !(std::fabs(o - keys * 0.3 * after) < 1e-4);
      }
  if (wrong) std::printf("%d wrong\n", wrong);
  return wrong != 0;
}
