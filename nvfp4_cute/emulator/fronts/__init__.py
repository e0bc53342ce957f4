"""The ways into the machine: PTX and arguments, host code of CuTe DSL, whole scripts with torch."""
