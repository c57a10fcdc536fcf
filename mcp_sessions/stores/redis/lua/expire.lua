-- needs: session
-- ARGV: now, held
local now = tonumber(ARGV[1])
local times = redis.call('HMGET', base, 'expires', 'ends', 'idle')
if not times[1] then
    return { 'gone' }
end
local expires, ends = seconds(times[1]), seconds(times[2])
if expires > now then
    return { 'later', times[1] }
end
if ARGV[2] == '1' and ends > now then
    return { 'later', move_deadline(now, tonumber(times[3]), ends) }
end
local found = record()
local tokens = redis.call('HGETALL', base .. ':u')
delete()
return { 'over', found, tokens }
