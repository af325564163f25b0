import tests.interpreter  # noqa: F401
