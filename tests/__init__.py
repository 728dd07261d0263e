"""The tests: folders that mirror the packages, folders of helpers, and tests of the whole."""
