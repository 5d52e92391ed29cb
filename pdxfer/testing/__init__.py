"""Fakes and conformance suites, shipped for plug-in authors: small real implementations, no mocks."""
