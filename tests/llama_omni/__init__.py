"""The package of `examples/llama_omni`, against a llama.cpp-omni server of these tests."""
