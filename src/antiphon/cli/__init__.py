"""The command line: `antiphon ask`, `models`, `doctor` and `bench`."""
