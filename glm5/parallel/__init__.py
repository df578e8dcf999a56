"""The same model on several devices: which tensor lies where, how sums cross devices, and the modules that do so."""
