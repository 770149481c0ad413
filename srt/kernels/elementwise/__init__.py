"""Work that handles each number of a row once: norms, rotation, activation, and the gathering of a step's inputs."""
