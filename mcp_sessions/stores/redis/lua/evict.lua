-- needs: session
-- ARGV: mode, whose, its latest deadline, whether one goes whose GET stream was open (of a transport
-- session, which must hold nothing)
local times = redis.call('HMGET', base, 'expires', 'ends', 'mode', 'owner', 'current', 'opened')
if not times[1] then
    return { 'gone' }
end
local expires, ends = seconds(times[1]), seconds(times[2])
if expires > tonumber(ARGV[3]) then
    return { 'later', times[1] }
end
-- Where the lifetime ends first, nobody knows when it was used.
if expires >= ends or times[3] ~= ARGV[1] or times[4] ~= ARGV[2] or times[3] == 'transport' and (times[5]
    or (times[6] and ARGV[4] == '0') or redis.call('EXISTS', base .. ':u', base .. ':c') > 0) then
    return { 'kept' }
end
local found, tokens = record(), redis.call('HGETALL', base .. ':u')
delete()
return { 'over', found, tokens }
