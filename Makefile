# Every target sets up what it needs first; see deploy/bootstrap.py.
PYTHON ?= python3

.PHONY: run test test-full check bench bench-soak compile build images audit clients peers lock

run:    ## the whole live stack: web UI, worker, router, replicas, traffic
	@exec $(PYTHON) deploy/bootstrap.py run

test:   ## every test, in real PostgreSQL, Valkey and Chromium
	@$(PYTHON) deploy/bootstrap.py test

test-full: ## the generated tests with all their examples; `make test` runs a fifth of them
	@TEST_FULL=1 $(PYTHON) deploy/bootstrap.py test -m "hypothesis or generated"

check:  ## format, lint, types, imports, migrations, documentation
	@$(PYTHON) deploy/bootstrap.py check

bench:  ## benchmarks, as tables
	@$(PYTHON) deploy/bootstrap.py bench

bench-soak: test-full ## generated tests in full and long benchmarks, compared with their limits; python -m tests.benchmarks soak --full runs them at full length
	@$(PYTHON) deploy/bootstrap.py bench soak

compile: ## the router as native code: a wheel in dist/, and the same in .compiled/ (needs a C compiler)
	@$(PYTHON) deploy/bootstrap.py compile

build:  ## what is published, in dist/: sdist, plain wheel, a compiled wheel for each Python that is installed
	@$(PYTHON) deploy/bootstrap.py build

images: ## container images, in dist/images/, without a container engine; see deploy/images/README.md
	@$(PYTHON) deploy/bootstrap.py images

audit:  ## known vulnerabilities of the locked packages; status 1 if there are any, 4 if nobody could be asked
	@$(PYTHON) deploy/bootstrap.py audit

clients: ## the OpenAI, Anthropic and LiteLLM clients and AIPerf against a router (needs 1 GB for them in .clients/)
	@$(PYTHON) deploy/bootstrap.py clients

peers:  ## the routers that users would pick instead, and ours, live on the same traffic (1 GB for them in .peers/, an hour)
	@$(PYTHON) deploy/bootstrap.py bench peers

lock:   ## rewrite requirements/*.txt from pyproject.toml
	@$(PYTHON) deploy/bootstrap.py lock
