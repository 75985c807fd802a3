# Writes the workloads of the three classic experiments that seeds_test.go replays: the generators are those of the
# published programs, seeds included. Run once, here: python3 generate.py && gzip -n9 *.txt
import random


def write(name, rows):
    with open(name, "w") as f:
        for row in rows:
            f.write(" ".join(repr(x) for x in row) + "\n")


# Three servers, one 1.6 times slower; 200 requests: arrival s, base service time s.
random.seed(11)
arrivals = sorted(random.uniform(0, 20) for _ in range(200))
service = [random.uniform(0.05, 0.15) for _ in range(200)]
write("three-uneven.txt", zip(arrivals, service))

# Eight servers, Pareto(1.5) service times capped at 20 s, 85 % load; 20,000 requests: arrival s, service time s.
rng = random.Random(42)
service = [min(0.05 * rng.paretovariate(1.5), 20.0) for _ in range(20000)]
rate = 0.85 * 8 / (sum(service) / 20000)
t, arrivals = 0.0, []
for _ in range(20000):
    t += rng.expovariate(rate)
    arrivals.append(t)
write("pareto.txt", zip(arrivals, service))

# Four replicas at 50 tokens/s, Pareto(1.3) tokens capped at 4,000, 80 % load; 6,000 requests: arrival s, tokens.
rng = random.Random(7)
tokens = [min(int(40 * rng.paretovariate(1.3)), 4000) for _ in range(6000)]
service = [t / 50.0 for t in tokens]
rate = 0.80 * 4 / (sum(service) / 6000)
t, arrivals = 0, []
for _ in range(6000):
    t += rng.expovariate(rate)
    arrivals.append(t)
write("tokens.txt", zip(arrivals, tokens))
