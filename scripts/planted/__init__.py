"""One-line bugs by package, each with the tests that must catch it."""
