# Every target sets up what it needs: a virtual environment with the versions of constraints.txt.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint check wheel docs clean

demo: $(VENV)/plots.done
	OMP_NUM_THREADS=1 $(BIN)/varprop demo --out demo

test: lint check wheel

lint: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: $(VENV)/dev.done
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The wheel, alone in an empty environment.
wheel: $(VENV)/dev.done
	rm -rf dist $(VENV)/empty
	$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	$(PYTHON) -m venv $(VENV)/empty
	$(VENV)/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd $(VENV) && empty/bin/python -W error::DeprecationWarning:varprop -c "import varprop; print('wheel of varprop', varprop.__version__, 'imports')"
	rm -rf $(VENV)/empty

docs: $(VENV)/docs.done
	$(BIN)/sphinx-build -W -q -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) dist demo docs/_build

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/plots.done: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[plots]"
	touch $@

$(VENV)/dev.done: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[plots,onnx,bench,docs,dev]"
	touch $@

$(VENV)/docs.done: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e ".[plots,docs]"
	touch $@
