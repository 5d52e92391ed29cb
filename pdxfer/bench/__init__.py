"""The benches' code, installed with the package; scripts in bench/ and `pdxfer bench` call it."""
