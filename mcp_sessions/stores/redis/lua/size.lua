-- needs: session
-- ARGV: latest deadline of one that sleeps
-- Bytes of a session that sleeps, as Redis counts them; of any other 0.
local times = redis.call('HMGET', base, 'expires', 'ends')
if not times[1] then
    return 0
end
local expires, ends = times[1], times[2]
if not has_come(expires, ARGV[1]) or has_come(ends, expires) then
    return 0
end
local bytes = 0
for _, key in ipairs(keys()) do
    bytes = bytes + (redis.call('MEMORY', 'USAGE', key) or 0)
end
return bytes
