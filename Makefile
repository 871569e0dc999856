# make demo    the main jobs: a prompt to a video, a real clip to latents and back; videos in out/, and a table
# make demo PROMPT="a green square grows on a white background"    the same, of another prompt
# make test    the tests, without those marked slow: some minutes on two cores
# make test-all    the slow ones too; of builds, meshes, lengths and caches some pairs, not their whole products
# make test-all TESTS=tests/vae    those of one folder; so for test-product
# make test-product    what those products have besides: some minutes on two cores
# make test-mosaic    compiles the published models' kernels for TPUS, by the libtpu of LIBTPU: minutes a topology
# make test-space    the page in space/, in a browser, with gradio's own versions of other packages
# make lint    ruff and pyright
# make docs    the site, in out/site; a dead link fails
# make test-versions    a part of the tests with the lowest and the newest versions of other packages
# Each makes a virtual environment in .venv first, from the exact versions in constraints.txt.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt
export JAX_PLATFORMS ?= cpu

SETS ?= lowest newest
TESTS ?= tests
LIBTPU ?= 0.0.42.1
TPUS ?= v5e:2x4 v5p:2x2x2 v6e:2x4 tpu7x:2x2x1

.PHONY: demo test test-all test-product test-mosaic test-space lint docs test-versions format clean

demo: $(VENV)/demo.done
	$(BIN)/cogvideox-torchax demo $(if $(PROMPT),--prompt "$(PROMPT)")

test: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not slow and not product"

test-all: $(VENV)/test.done
	$(BIN)/python -m pytest -m "not product" $(TESTS)

test-product: $(VENV)/test.done
	$(BIN)/python -m pytest -m product $(TESTS)

# It leaves the virtual environment with another libtpu than constraints.txt names.
test-mosaic: $(VENV)/test.done
	$(BIN)/python -m pip install --quiet libtpu==$(LIBTPU)
	PYTHONPATH=. $(BIN)/python scripts/compile_kernels.py $(TPUS)

# It leaves the virtual environment with gradio, and with the versions of Pillow and tomlkit that gradio takes.
test-space: $(VENV)/test.done
	$(BIN)/python -m pip install --quiet gradio
	$(BIN)/python -m pytest --numprocesses=0 tests/examples/test_space.py

lint: $(VENV)/test.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/docs.done
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet --site-dir out/site

test-versions: $(VENV)/test.done
	$(BIN)/python scripts/version_matrix.py $(SETS)

format: $(VENV)/test.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) out

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[cpu,video,text]'
	touch $@

$(VENV)/test.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[cpu,test]'
	touch $@

$(VENV)/docs.done: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[cpu,docs]'
	touch $@
